"""The drawing of the three routes of sparse entries: the bytes from every rank to every other."""

from __future__ import annotations

import torch

from laboratory.drawings.canvas import SENT, Canvas
from laboratory.drawings.trace import Trace, trace

RANKS, ENTRIES, RATIO = 8, 1 << 16, 0.01


def routes() -> str:
    """Draw a step of topk with each route."""
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(ENTRIES, generator=generator).tolist() for _ in range(RANKS)]
    steps = {route: trace(f"topk:ratio={RATIO},route={route}", [grads]) for route in ("allgather", "split", "tree")}
    tables = {route: bytes_between(step) for route, step in steps.items()}
    canvas = Canvas("The routes of sparse entries: bytes from each rank to each other")
    canvas.heading(f"{RANKS} ranks, {ENTRIES:,} entries, one in {1 / RATIO:.0f}", SENT)
    canvas.note("Row: the rank that a payload is of. Column: who gets it.", "The stronger, the more bytes.")
    canvas.tables([*tables.items()], 3)
    most = {route: max(map(sum, table)) for route, table in tables.items()}
    canvas.boxes([["most of a rank:", f"{size:,} bytes"] for size in most.values()], 3)
    return canvas.svg()


def bytes_between(step: Trace) -> list[list[int]]:
    """Count the bytes of each rank's payloads that reach each other rank."""
    table = [[0] * step.ranks for _ in range(step.ranks)]
    for rank, messages in enumerate(step.messages):
        for message in messages:
            size = 0 if message.payload is None else message.payload.bytes.numel()
            others = [other for other in range(step.ranks) if other != rank]
            for other in others if message.kind == "gather" else message.to:
                table[rank][other] += size
    return table
