"""lgc's state between steps, and the split of the model into first layer, middle and last layer."""

from __future__ import annotations

import torch

from gradcomp.compressors.lgc.autoencoder import Autoencoder
from gradcomp.compressors.lgc.code_error import SUMMARY_LENGTH, CodeError
from gradcomp.compressors.lgc.phases import DENSE, Phases
from gradcomp.compressors.lgc.stopwatch import Stopwatch
from gradcomp.core.compressor import Layout

# The largest share of the entries with which first=auto sends the first layer dense.
SMALL_FIRST_LAYER = 0.01


class LgcState:
    """The model's state between steps."""

    def __init__(self, layout: Layout, seed: int, phases: Phases, bound: float, first: str, last: str):
        self.seed, self.phases, self.phase = seed, phases, DENSE
        self.error = CodeError(bound, seed, layout.device)
        self.stopwatch = Stopwatch(layout.device)
        self.coder: Autoencoder | None = None
        # A bucket begins with the model's last layer.
        last_end, first_begin = _middle(layout)
        if last == "code":
            last_end = 0
        if first == "code" or (first == "auto" and layout.total - first_begin > SMALL_FIRST_LAYER * layout.total):
            first_begin = layout.total
        self.last, self.middle = slice(0, last_end), slice(last_end, first_begin)
        self.first = slice(first_begin, layout.total)
        self.update = torch.zeros(layout.total, device=layout.device)
        self.first_buffer = torch.zeros(layout.total - first_begin + SUMMARY_LENGTH, device=layout.device)


def _middle(layout: Layout) -> tuple[int, int]:
    """Return where the entries between the last and the first layer begin and end.

    Here a layer is a module with all its parameters. The whole model is the middle if nothing lies between the two.
    """
    modules = [_module(name) for name in layout.names]
    spans = [span for span, module in zip(layout.spans, modules, strict=True) if module not in (modules[0], modules[-1])]
    return (spans[0][0], spans[-1][1]) if spans else (0, layout.total)


def _module(name: str) -> str:
    """Return the name of a parameter's module. A parameter with a number for a name, or no module, is a module of its own."""
    head, _, leaf = name.rpartition(".")
    return name if not head or leaf.isdigit() else head
