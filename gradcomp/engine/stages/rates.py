"""Learning rates of the residual: an entry acts with the rate of the step in which its gradient came.

The optimizer multiplies an update by its rate of the moment. A residual from another rate is therefore multiplied by old / new
whenever the rate changes. Weights then move by the rates that every gradient came with, as they do without compression. In a
step with the rate 0, nothing of the residual is sent, and its gradients are dropped.

This holds for an optimizer that moves weights by multiples of its updates: SGD, or directions of Adam.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradcomp import saved
from gradcomp.core.compressor import Layout, Steps
from gradcomp.core.requests import World
from gradcomp.engine.context import ANY, Rates, StepContext
from gradcomp.engine.stages.stage import Accumulation, Copy, Part, Shares, Stage
from gradcomp.native.extension import LARGEST

# Factors of layers that differ by less are one: schedulers multiply rates of the groups one by one, and each is rounded.
ALIKE = 1e-6
# The smallest factor that a kernel's float holds in full precision.
SMALLEST = 2.0**-126


@dataclass
class RatesState:
    """rates: of the layers, under which the residual was found. residual_at_zero_rate: the residual in a step of rate 0."""

    rates: Rates = None
    residual_at_zero_rate: Tensor | None = None


class RateCorrection(Stage):
    """Multiplies the residual by old / new where the learning rate changes."""

    name: ClassVar[str] = "rates"

    def init(self, layout: Layout, seed: int) -> RatesState:
        return RatesState()

    def prepare(self, accumulation: Accumulation, state: RatesState, context: StepContext) -> None:
        rates = context.own_rates(accumulation.layout)
        # An update that is larger than its gradients may be too large for float16.
        if rates is not None and any(grad.dtype == torch.float16 for grad in accumulation.grads):
            rates = None
        state.residual_at_zero_rate = None
        if rates is not None and not any(rates):
            state.residual_at_zero_rate = accumulation.residual.clone()
            accumulation.residual_factor, accumulation.residual_is_kept = 0.0, True
        else:
            accumulation.residual_factor = _factor(state, rates)

    def around(self, steps: Steps, accumulation: Accumulation, state: RatesState, world: World) -> Steps:
        return _with_residual_back(steps, accumulation.residual, state) if accumulation.residual_is_kept else steps

    def save(self, state: RatesState, layout: Layout, copy: Copy) -> Part:
        rates = zip(layout.names, state.rates or (), strict=False)
        return Part({"rate": {name: max(rate, 0.0) for name, rate in rates if rate != ANY}})

    def load(self, state: RatesState, layout: Layout, shares: Shares) -> Callable[[], None]:
        def copy() -> None:
            if shares.own:
                state.rates = tuple(known.get(name, ANY) for name in layout.names) if known else None

        known: dict[str, float] = {}
        if shares.own:
            theirs = saved.table_or_empty(shares.own[0].layers, "rate")
            known = {name: saved.number(theirs, name) for name in layout.names if name in theirs}
        return copy


def _factor(state: RatesState, rates: Rates) -> float:
    """Note a step's rates, and return the factor of the residual.

    It is 1 where the rate of a layer is unknown, and where those of a bucket's layers change unlike each other: layers with a
    factor of their own would push others out of a selection by magnitude. A rate of 0 changes nothing: the layer's residual
    keeps the last one.
    """
    before = state.rates
    if before is None or rates is None or rates == before:
        state.rates = rates
        return 1.0
    state.rates = tuple(new if _is_known(new) else old for old, new in zip(before, rates, strict=True))
    pairs = [(old, new) for old, new in zip(before, rates, strict=True) if old != ANY]
    if not all(_is_known(old) and _is_known(new) for old, new in pairs):
        return 1.0
    factors = [old / new for old, new in pairs]
    if not factors or max(factors) > (1 + ALIKE) * min(factors):
        return 1.0
    return min(max(factors[0], SMALLEST), LARGEST)


def _with_residual_back(steps: Steps, residual: Tensor, state: RatesState) -> Steps:
    """Exchange a step's gradients alone, and restore the residual."""
    update = yield from steps
    assert state.residual_at_zero_rate is not None
    residual.copy_(state.residual_at_zero_rate)
    state.residual_at_zero_rate = None
    return update


def _is_known(rate: float) -> bool:
    return 0 < rate < math.inf
