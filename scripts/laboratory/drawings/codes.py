"""The drawing of lgc: a step of codes, after a few steps in which a small autoencoder has learned."""

from __future__ import annotations

import torch

from gradcomp.compressors.lgc import Lgc
from gradcomp.compressors.lgc.autoencoder import CODE_CHANNELS
from gradcomp.compressors.lgc.phases import CODE
from gradcomp.core.requests import Payload
from laboratory.drawings.canvas import RESIDUAL, SENT, UPDATE, WAITS, Canvas, Panel
from laboratory.drawings.trace import Message, trace

LEARN = 24
SPEC = f"lgc:ratio=0.125,dense=1,learn={LEARN},bands=4,window=128"
LAYERS = {"first": 2, "middle": 256, "last": 16}
# The request that carries the codes, after those of the last layer's entries and of the common places.
CODES = 2


def lgc() -> str:
    """Draw a step of lgc's ring, in the third phase."""
    step = trace(SPEC, [_grads(number) for number in range(LEARN + 2)], LAYERS)
    state = step.states[0].inner
    assert state.phase == CODE
    middle = slice(LAYERS["first"], LAYERS["first"] + LAYERS["middle"])
    update = step.update[middle]
    places = [place for place, value in enumerate(update) if value]
    entries = [[values[middle][place] for place in places] for values in step.accs]
    codes = _codes(step.messages[0])
    canvas = Canvas("lgc: an autoencoder codes entries at common places")
    canvas.heading("Three phases", UPDATE)
    defaults = Lgc()
    phases = [["1: all entries", f"{defaults.dense} steps"], ["2: as they are, to", f"learn; {defaults.learn} steps"]]
    canvas.boxes([*phases, ["3: codes,", "shown below"]], 3)
    canvas.heading("In each rank: residual + gradient", WAITS)
    scale = max(abs(value) for values in entries for value in values)
    count, others = len(places), LAYERS["middle"] - len(places)
    canvas.panels([_thin(f"rank {rank}: {count} entries", own, SENT) for rank, own in enumerate(entries)], scale)
    canvas.note(
        f"Those of {LAYERS['middle']} that travel: the largest of rank 0 in one",
        "part of the layer, and of rank 1 in the other",
    )
    canvas.heading("Sent: places, and a code of the entries", SENT)
    canvas.tables([(f"rank {rank}: code of {len(row[0]) * len(row)} numbers", row) for rank, row in enumerate(codes)])
    canvas.arrow("gather: the mean of the codes, decoded by every rank")
    canvas.heading("On every rank: the update, beside the mean", UPDATE)
    mean = [sum(own) / len(entries) for own in zip(*entries, strict=True)]
    decoded = [update[place] for place in places]
    canvas.panels([_thin("the decoded mean", decoded, UPDATE), _thin("the mean of the entries", mean, WAITS)], scale)
    canvas.heading("Stays in the residual: the coding error", RESIDUAL)
    errors = [[values[middle][place] for place in places] for values in step.residuals]
    canvas.panels([_thin(f"rank {rank}", own, RESIDUAL) for rank, own in enumerate(errors)], scale)
    canvas.note(f"And all entries at the other {others} places")
    return canvas.svg()


def _thin(title: str, values: list[float], colour: str) -> Panel:
    return Panel(title, values, [colour] * len(values), labelled=False)


def _grads(number: int) -> list[list[float]]:
    """Draw the gradients of two ranks, which have a common part. The layer's entries differ in size."""
    size = sum(LAYERS.values())
    generator = torch.Generator().manual_seed(number)
    sizes = torch.linspace(0.2, 2, size)[torch.arange(size) * 101 % size]
    common = torch.randn(size, generator=generator)
    return [(sizes * (common + 0.3 * torch.randn(size, generator=generator))).tolist() for _ in range(2)]


def _codes(messages: list[Message]) -> list[list[list[float]]]:
    """Return each rank's code as rows of numbers: four channels for each of the common rows."""
    payloads: list[Payload] = messages[CODES].reply
    return [payload["bytes"].float().view(-1, CODE_CHANNELS).tolist() for payload in payloads]
