"""The health of a bucket's residual: measured now and then, shown by stats(), and warned of once if it grows without bound."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradcomp.core.compressor import Layout, Steps
from gradcomp.core.requests import World
from gradcomp.engine.context import StepContext
from gradcomp.engine.stages.stage import Accumulation, Stage
from gradcomp.native import kernels
from gradcomp.native.memory import HostCopy

# Steps between two measurements. Each is at most four passes over the bucket.
INTERVAL = 50
# Entries in one computation of ages.
PART = 2**20
# An entry is old if it was last sent this many steps ago, or more.
OLD = 128
# A take that leaves this share of the squares or more, in so many measurements, will not keep the residual from growing. With
# few old entries, other steps have sent it: a flush.
TAKES_NOTHING, TIMES, SOME_OLD = 1.0, 3, 0.5
# A residual that grew by this factor between so many measurements on end grows exponentially.
GROWTH, GROWTHS = 1.5, 8

_WARNING = (
    "{spec}: the residual of {layers} grows without bound: {why}. Gradients in it will come late or never. Send more "
    "(a higher ratio, a lower lam, more levels, a smaller group), clip with clip=, or write feedback=false; see "
    'stats()["health"]'
)


@dataclass(frozen=True)
class Health(Stage):
    """Measures the residual of a bucket before and after a take. spec: for the warning."""

    name: ClassVar[str] = "health"
    spec: str

    def init(self, layout: Layout, seed: int) -> Measurements:
        return Measurements(self.spec, layout.names)

    def after(self, accumulation: Accumulation, state: Measurements, context: StepContext) -> None:
        if accumulation.step % INTERVAL == 0:
            state.before(accumulation, _squares(accumulation) if accumulation.adds_gradients else None)

    def around(self, steps: Steps, accumulation: Accumulation, state: Measurements, world: World) -> Steps:
        if accumulation.step % INTERVAL or accumulation.residual_is_kept:
            return steps
        return _measured(steps, state, accumulation.residual)


class Measurements:
    """Measurements of one bucket. On a GPU each is read at the next one, so that no step waits for it.

    figures: of the last measurement. warning: once given.
    """

    def __init__(self, spec: str, names: tuple[str, ...]):
        self._spec, self._names = spec, names
        self._measured: HostCopy | None = None
        self._measuring = torch.empty(0)
        self._left_most = self._grew = 0
        self._last = 0.0
        self.warning = ""
        self.figures: dict[str, float] = {}

    def before(self, accumulation: Accumulation, squares: Tensor | None) -> None:
        """Measure before a take. squares: of each layer's gradient, summed, where gradients are added to the residual."""
        self._read()
        residual, mask = accumulation.residual, accumulation.mask
        self._measuring = torch.full((5,), math.nan, dtype=torch.float64, device=residual.device)
        self._measuring[1:3] = 0
        if squares is not None:
            self._measuring[0] = squares.sum()
        kernels.sum_squares([residual], self._measuring[1:2])
        if mask is not None:
            last_sent: Any = mask.last_sent
            self._measuring[3] = _count_old(last_sent, mask.step).double() / max(1, len(last_sent))
        self._measuring[4:] = accumulation.flag

    def after(self, residual: Tensor) -> None:
        """Measure after the take."""
        kernels.sum_squares([residual], self._measuring[2:3])
        self._measured = HostCopy(self._measuring)
        if not residual.is_cuda:
            self._read()

    def _read(self) -> None:
        if self._measured is None:
            return
        gradient, before, after, old, refused = self._measured.all()
        self._measured = None
        share_left = after / before if before > 0 else 0.0
        if refused or not (math.isfinite(before) and math.isfinite(after)):
            return
        self.figures = {"taken": 1 - share_left}
        if not math.isnan(gradient):
            self.figures["residual_over_gradient"] = (after / gradient) ** 0.5 if gradient else 0.0
        if not math.isnan(old):
            self.figures["older"] = old
        self._judge(share_left >= TAKES_NOTHING and not old < SOME_OLD, after**0.5)

    def _judge(self, took_nothing: bool, residual: float) -> None:
        self._left_most = self._left_most + 1 if took_nothing else 0
        self._grew = self._grew + 1 if residual > GROWTH * self._last > 0 else 0
        self._last = residual
        if self.warning or (self._left_most < TIMES and self._grew < GROWTHS):
            return
        takes_nothing = f"{TIMES} of {TIMES} measured steps took nothing out of it"
        grew = f"it grew {GROWTH}-fold {GROWTHS} times on end, every {INTERVAL} steps"
        first, *others = self._names
        layers = repr(first) + (f" and {len(others)} more layers" if others else "")
        why = takes_nothing if self._left_most >= TIMES else grew
        self.warning = _WARNING.format(spec=self._spec, layers=layers, why=why)
        warnings.warn(self.warning, stacklevel=2)


def _squares(accumulation: Accumulation) -> Tensor:
    """Sum the squares of each layer's gradient, as it is added to the residual."""
    squares = torch.zeros(len(accumulation.grads), dtype=torch.float64, device=accumulation.residual.device)
    kernels.sum_squares(accumulation.grads, squares, accumulation.memory)
    scale = accumulation.loss_scale
    for factor in (accumulation.scales, None if scale is None else 1 / scale):
        squares *= 1 if factor is None else factor.double().square()
    return squares


def _measured(steps: Steps, measurements: Measurements, residual: Tensor) -> Steps:
    """Run an exchange, and measure after it."""
    update = yield from steps
    measurements.after(residual)
    return update


def _count_old(last_sent: Tensor, step: int) -> Tensor:
    """Count the old entries. The steps of much older ones are moved up, so that modulo 256 they stay old."""
    count = torch.zeros((), dtype=torch.int64, device=last_sent.device)
    for part in last_sent.split(PART):
        is_old = step % 256 - part >= OLD  # modulo 256, too
        part.masked_fill_(is_old, (step - OLD) % 256)
        count += is_old.count_nonzero()
    return count
