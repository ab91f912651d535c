"""The health of a bucket's residual: measured now and then, shown by stats(), and warned of once if it grows without bound."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch

from gradcomp.aliases import GradcompWarning
from gradcomp.core.compressor import Acc, Compressor, Steps
from gradcomp.native import kernels
from gradcomp.native.memory import HostCopy

# Steps between two measurements. Each is at most four passes over the bucket.
INTERVAL = 50
# A take that leaves this share of the squares or more, in so many measurements, will not keep the residual from growing.
TAKES_NOTHING, TIMES = 1.0, 3
# A residual that grew by this factor between so many measurements on end grows exponentially.
GROWTH, GROWTHS = 1.5, 8

_WARNING = (
    "{spec}: the residual of {layers} grows without bound: {why}. Gradients in it will come late or never, and the training "
    'may diverge. {remedy}, clip with clip=, or write feedback=false; see stats()["health"]'
)
# The verb by which a knob sends more. Of a pair, the second counts where the first is no number.
_SENDING = ({"ratio": "raise"}, {"lam": "lower", "density": "raise"}, {"levels": "raise"}, {"group": "lower"})


def remedy(compressor: Compressor) -> str:
    """Name the knobs of a compressor that send more."""
    while (inner := getattr(compressor, "inner", None)) is not None:
        compressor = inner
    named = []
    for pair in _SENDING:
        found = [
            (verb, knob, value)
            for knob, verb in pair.items()
            if isinstance(value := getattr(compressor, knob, None), int | float)
        ]
        named += [f"{verb} {knob}={value:g}" for verb, knob, value in found[:1]]
    return "Send more: " + " or ".join(named) if named else "Choose a spec that sends more"


class Health:
    """The health of one bucket's residual. On a GPU each measurement is read at the next one, so that no step waits for it.

    figures: of the last measurement. warning: once given.
    """

    def __init__(self, compressor: Compressor, layers: Sequence[str]):
        """compressor: with its error feedback."""
        self._compressor, self._layers = compressor, layers
        self._measured: HostCopy | None = None
        self._left_most = self._grew = 0
        self._last = 0.0
        self.warning = ""
        self.figures: dict[str, float] = {}

    def around(self, steps: Steps, acc: Acc) -> Steps:
        """Run an exchange, and measure the residual before and after it."""
        self._read()
        measured = torch.zeros(3, dtype=torch.float64, device=acc.residual.device)
        kernels.sum_squares([acc.residual], measured[:1])
        if acc.flag is not None:
            measured[2:] = acc.flag
        update = yield from steps
        kernels.sum_squares([acc.residual], measured[1:2])
        self._measured = HostCopy(measured)
        if not measured.is_cuda:
            self._read()
        return update

    def _read(self) -> None:
        if self._measured is None:
            return
        before, after, refused = self._measured.all()
        self._measured = None
        if refused or not (math.isfinite(before) and math.isfinite(after)):
            return
        share_left = after / before if before > 0 else 0.0
        self.figures = {"taken": 1 - share_left}
        self._judge(share_left, after**0.5)

    def _judge(self, share_left: float, residual: float) -> None:
        """Judge a measurement."""
        self._left_most = self._left_most + 1 if share_left >= TAKES_NOTHING else 0
        self._grew = self._grew + 1 if residual > GROWTH * self._last > 0 else 0
        self._last = residual
        if self._left_most >= TIMES:
            self._warn(f"{TIMES} of {TIMES} measured steps took nothing out of it")
        elif self._grew >= GROWTHS:
            self._warn(f"it grew {GROWTH}-fold {GROWTHS} times in a row, every {INTERVAL} steps")

    def _warn(self, why: str) -> None:
        if self.warning:
            return
        first, *others = self._layers
        layers = repr(first) + (f" and {len(others)} more layers" if others else "")
        self.warning = _WARNING.format(spec=self._compressor, layers=layers, why=why, remedy=remedy(self._compressor))
        warnings.warn(self.warning, GradcompWarning, stacklevel=2)
