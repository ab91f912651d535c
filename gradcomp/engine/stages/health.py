"""The health of a bucket's residual: measured now and then, shown by stats(), and warned of once if it grows without bound."""

from __future__ import annotations

import math
import statistics
import warnings
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradcomp.core.compressor import Acc, Compressor, Layout, Steps
from gradcomp.engine.stages.stage import Stage
from gradcomp.native import kernels
from gradcomp.native.memory import HostCopy

# Steps between two measurements. Each is at most four passes over the bucket.
INTERVAL = 50
# A take that leaves this share of the squares or more, in so many measurements, will not keep the residual from growing.
TAKES_NOTHING, TIMES = 1.0, 3
# A residual that grew by this factor between so many measurements on end grows exponentially.
GROWTH, GROWTHS = 1.5, 8
# The measurements before the next two findings. Those end once the measured steps stand for takes of so many residuals: a good
# training gets there in some hundred steps.
FEWEST, SENT = 3, 1.0
# The median of all takes, times all steps, is less than this part of a residual: hardly anything has been sent yet.
HARDLY = 0.08
# An unsent residual grows with the steps where gradients stay as they are. A higher power is divergence.
POWER = 1.3

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


@dataclass(frozen=True)
class Health(Stage):
    """Measures the residual of a bucket before and after a take. spec, remedy: for the warning."""

    name: ClassVar[str] = "health"
    interval: ClassVar[int] = INTERVAL
    spec: str
    remedy: str

    def init(self, layout: Layout, seed: int) -> Measurements:
        return Measurements(self, layout.names)

    def around(self, steps: Steps, acc: Acc, state: Measurements) -> Steps:
        return _measured(steps, state, acc)


class Measurements:
    """Measurements of one bucket. On a GPU each is read at the next one, so that no step waits for it.

    figures: of the last measurement. warning: once given.
    """

    def __init__(self, stage: Health, names: tuple[str, ...]):
        self._stage, self._names = stage, names
        self._measured: HostCopy | None = None
        self._measuring = torch.empty(0)
        self._left_most = self._grew = 0
        self._last = 0.0
        self._taken: list[float] = []
        self._residuals: list[float] = []
        self.warning = ""
        self.figures: dict[str, float] = {}

    def before(self, acc: Acc) -> None:
        """Measure before a take."""
        self._read()
        self._measuring = torch.zeros(3, dtype=torch.float64, device=acc.residual.device)
        kernels.sum_squares([acc.residual], self._measuring[:1])
        if acc.flag is not None:
            self._measuring[2:] = acc.flag

    def after(self, residual: Tensor) -> None:
        """Measure after the take."""
        kernels.sum_squares([residual], self._measuring[1:2])
        self._measured = HostCopy(self._measuring)
        if not residual.is_cuda:
            self._read()

    def _read(self) -> None:
        if self._measured is None:
            return
        before, after, refused = self._measured.all()
        self._measured = None
        share_left = after / before if before > 0 else 0.0
        if refused or not (math.isfinite(before) and math.isfinite(after)):
            return
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
            self._warn(f"it grew {GROWTH}-fold {GROWTHS} times on end, every {INTERVAL} steps")
        elif INTERVAL * sum(self._taken) < SENT:
            self._taken.append(1 - share_left)
            self._residuals.append(residual)
            if len(self._taken) >= FEWEST:
                self._judge_all()

    def _judge_all(self) -> None:
        """Judge all measurements together."""
        now = len(self._taken)
        half, steps = now // 2, now * INTERVAL
        earlier, residual, sent = self._residuals[half - 1], self._residuals[-1], INTERVAL * sum(self._taken)
        if steps * statistics.median(self._taken) < HARDLY:
            self._warn(
                f"steps take {statistics.median(self._taken):.2g} of its squares, which is hardly anything of it in {steps}"
            )
        elif sent < SENT and residual > earlier * (now / half) ** POWER > 0:
            self._warn(
                f"it grew {residual / earlier:.2g}-fold while steps grew {now / half:.2g}-fold, and less than all was sent"
            )

    def _warn(self, why: str) -> None:
        if self.warning:
            return
        first, *others = self._names
        layers = repr(first) + (f" and {len(others)} more layers" if others else "")
        self.warning = _WARNING.format(spec=self._stage.spec, layers=layers, why=why, remedy=self._stage.remedy)
        warnings.warn(self.warning, stacklevel=2)


def _measured(steps: Steps, measurements: Measurements, acc: Acc) -> Steps:
    """Run an exchange, and measure before and after it."""
    measurements.before(acc)
    update = yield from steps
    measurements.after(acc.residual)
    return update
