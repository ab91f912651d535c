"""Drawings of compressors that find the largest sums with a count sketch."""

from __future__ import annotations

import torch

from gradcomp.exchanges.sketched import SketchTable
from gradcomp.native import kernels
from gradcomp.native.memory import Memory
from laboratory.drawings.canvas import SENT, WAITS, Canvas, Panel, number
from laboratory.drawings.trace import Trace, trace
from laboratory.drawings.whole import finish, largest

KNOBS = "ratio=0.02,rows=3,columns=16,candidates=2"
ENTRIES = 96
# Entries that stand out, by rank. Rank 0 has a large one of its own at 71, and rank 1 at 85.
HEAVY = [{11: 12.0, 40: -8.0, 71: 9.0}, {11: 9.0, 40: -9.0, 71: 1.0, 85: -10.0}]


def grads() -> list[list[float]]:
    """Make the gradients of two ranks: small whole numbers, but for a few large ones."""
    made = []
    for rank, heavy in enumerate(HEAVY):
        values = [float((7 * place + 3 * rank * place * place) % 5 - 2) for place in range(ENTRIES)]
        made.append([heavy.get(place, value) for place, value in enumerate(values)])
    return made


def gs_sgd() -> str:
    """Draw a step of gs_sgd."""
    step = trace(f"gs_sgd:{KNOBS}", [grads()])
    canvas = Canvas("gs_sgd: the ranks sum count sketches, then exact values")
    table, candidates = _begin(canvas, step)
    own = [messages[0].tensor for messages in step.messages]
    canvas.heading("Sent first: a table of signed sums", SENT)
    canvas.tables([(f"rank {rank}", _rows(table, cells)) for rank, cells in enumerate(own)])
    canvas.arrow("allreduce: the sum of the tables")
    canvas.tables([("on every rank", _rows(table, step.messages[0][0].reply))], 1)
    canvas.note(f"Every rank finds the same {len(candidates)} candidates in it:", f"entries {_list(candidates)}")
    canvas.heading("Sent next: exact values of the candidates", SENT)
    canvas.boxes([[f"rank {rank}: {_values(step, rank, candidates)}"] for rank in range(step.ranks)], 1)
    return finish(canvas, step, f"allreduce: exact sums, of which the {table.sizes.k} largest count")


def sketched_sgd() -> str:
    """Draw a step of sketched_sgd."""
    step = trace(f"sketched_sgd:{KNOBS}", [grads()])
    canvas = Canvas("sketched_sgd: a server sums count sketches, then exact values")
    table, candidates = _begin(canvas, step)
    sent = [message.payload for message in step.messages[1] if message.payload is not None]
    answers = [message.payload for message in step.messages[0] if message.payload is not None]
    assert answers[0]["bytes"].tolist() == candidates
    canvas.heading("Sent to the server, rank 0: a table of signed sums", SENT)
    canvas.tables([("rank 1", _rows(table, sent[0]["bytes"]))])
    canvas.arrow("the server adds its own table")
    canvas.boxes(
        [
            [f"rank 0 to all: the candidates, entries {_list(candidates)}"],
            ["rank 1 to rank 0: " + _values(step, 1, candidates)],
            [f"rank 0 to all: the {table.sizes.k} largest sums, and their places"],
        ],
        1,
    )
    return finish(canvas, step, "the server's answer")


def _begin(canvas: Canvas, step: Trace) -> tuple[SketchTable, list[int]]:
    """Draw the ranks' entries. Return the sketch, and the candidates."""
    table = step.states[0].inner
    assert isinstance(table, SketchTable)
    total = torch.zeros(table.sizes.cells + 1)
    for values in step.accs:
        cells = torch.empty(table.sizes.cells)
        kernels.sketch(torch.tensor(values), table.sizes.rows, table.seed, cells, 1.0)
        total[:-1] += cells
    candidates = table.heaviest(total, table.sizes.candidates, Memory()).tolist()
    chosen = [place for place, value in enumerate(step.update) if value]
    canvas.heading("In each rank: residual + gradient", WAITS)
    panels = []
    for rank, values in enumerate(step.accs):
        colours = [SENT if place in candidates else WAITS for place in range(len(values))]
        panels.append(Panel(f"rank {rank}: {len(values)} entries", values, colours, labelled=False))
    canvas.panels(panels, largest(step))
    assert set(chosen) <= set(candidates)
    return table, candidates


def _rows(table: SketchTable, cells: torch.Tensor | None) -> list[list[float]]:
    assert cells is not None
    rows: list[list[float]] = cells[: table.sizes.cells].view(table.sizes.rows, -1).tolist()
    return rows


def _values(step: Trace, rank: int, places: list[int]) -> str:
    values = ", ".join(number(step.accs[rank][place]) for place in places)
    return f"entries {_list(places)} are {values}"


def _list(places: list[int]) -> str:
    return ", ".join(map(str, places[:-1])) + f" and {places[-1]}"
