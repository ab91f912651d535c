"""Drawings of compressors that round every entry to one of a few levels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

import gradcomp
from gradcomp.exchanges.quantised import Quantiser
from gradcomp.messages.levels import RoundingRule
from laboratory.drawings.canvas import SENT, WAITS, Canvas, Panel, number
from laboratory.drawings.trace import Message, trace
from laboratory.drawings.whole import GRADS, finish

LOST = "Nothing: the rounding errors are lost."


def rounded(spec: str, title: str, what: str, sent: str) -> Callable[[], str]:
    """Return a function that draws a step. what: what the levels are. sent: what says them."""

    def draw() -> str:
        step, compressor = trace(spec, [GRADS[:2]]), _quantiser(spec)
        name = compressor.name
        canvas = Canvas(f"{name}: {title}")
        fed_back = any(any(values) for values in step.residuals)
        canvas.heading("In each rank: residual + gradient" if fed_back else "In each rank: the gradient", WAITS)
        found = [_round(compressor, messages[0]) for messages in step.messages]
        panels = [
            Panel(f"rank {rank}", values, [WAITS] * len(values), levels, dots)
            for rank, (values, (levels, _, dots)) in enumerate(zip(step.accs, found, strict=True))
        ]
        scale = max(abs(value) for panel in panels for value in (*panel.values, *panel.lines))
        canvas.panels(panels, scale, height=70)
        canvas.note(what, "Circles: the level that each entry is rounded to")
        canvas.heading("Sent: levels, and a number for each entry", SENT)
        texts = []
        for messages, (levels, own, dots), size in zip(step.messages, found, step.bytes_sent, strict=True):
            numbers = " ".join(str(_nearest(levels, dot)) for dot in dots)
            texts.append([f"{sent} {' '.join(map(number, own))}", f"numbers {numbers}", f"{size} bytes, 8 of them a header"])
            assert len(messages) == 1
        canvas.boxes(texts)
        return finish(canvas, step, "gather: all payloads to all ranks; their mean is taken", "" if fed_back else LOST)

    return draw


def _quantiser(spec: str) -> Quantiser:
    """Return the innermost compressor of a spec."""
    made = gradcomp.make(spec)
    while not isinstance(made, Quantiser):
        made = made.inner  # type: ignore[attr-defined]
    return made


def _round(compressor: Quantiser, message: Message) -> tuple[list[float], list[float], list[float]]:
    """Return a payload's levels, those of them that travel, and the level of each entry."""
    assert message.payload is not None
    n = len(GRADS[0])
    entries = torch.zeros(n)
    compressor.rounding(n).add(entries, [message.payload], 1.0)
    own = message.payload["levels"].tolist()
    return _levels(compressor.rule, own), own, entries.tolist()


def _levels(rule: RoundingRule, own: Sequence[float]) -> list[float]:
    """Return all levels of a group, from those that travel."""
    if len(own) == rule.count:
        return list(own)
    low, high = (-own[0], own[0]) if len(own) == 1 else own
    return torch.linspace(low, high, rule.count).tolist()


def _nearest(levels: Sequence[float], value: float) -> int:
    return min(range(len(levels)), key=lambda place: abs(levels[place] - value))
