"""What lgc keeps of the model between steps, and which layers travel in which way."""

from __future__ import annotations

import torch

from gradcomp.compressors.lgc.autoencoder import Autoencoder
from gradcomp.compressors.lgc.code_error import NOTES, CodeError
from gradcomp.compressors.lgc.phases import DENSE, Phases
from gradcomp.compressors.lgc.stopwatch import Stopwatch
from gradcomp.protocol import Layout

SMALL = 0.01
"""Of the entries: a first layer that is no more travels as it is."""


class LgcState:
    """What lgc keeps between steps."""

    def __init__(self, layout: Layout, seed: int, phases: Phases, bound: float, first_as: str, last_as: str):
        self.seed, self.phases, self.phase = seed, phases, DENSE
        self.error = CodeError(bound, seed, layout.device)
        self.stopwatch = Stopwatch(layout.device)
        self.coder: Autoencoder | None = None
        last, first = _ends(layout)
        if last_as == "code":
            last = 0
        if first_as == "code" or (first_as == "auto" and layout.total - first > SMALL * layout.total):
            first = layout.total
        self.last, self.middle, self.first = slice(0, last), slice(last, first), slice(first, layout.total)
        self.update = torch.zeros(layout.total, device=layout.device)
        self.ends = torch.zeros(layout.total - first + NOTES, device=layout.device)


def _ends(layout: Layout) -> tuple[int, int]:
    """Where the last layer ends, with which a bucket begins, and where the first one begins; of a module's parameters all
    belong to it. A model without anything between them is all between."""
    modules = [_module(name) for name in layout.names]
    spans = [span for span, module in zip(layout.spans, modules, strict=True) if module not in (modules[0], modules[-1])]
    return (spans[0][0], spans[-1][1]) if spans else (0, layout.total)


def _module(name: str) -> str:
    """Whose parameter it is. Numbered ones, as those without a name are, count each by itself."""
    head, _, leaf = name.rpartition(".")
    return name if not head or leaf.isdigit() else head
