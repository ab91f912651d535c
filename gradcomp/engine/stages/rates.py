"""Learning rates of the residual: an entry acts with the rate of the step in which its gradient came.

The optimizer multiplies an update by its rate of the moment. A residual from another rate is therefore multiplied by old / new
whenever the rate changes. Weights then move by the rates that every gradient came with, as they do without compression. In a
step with the rate 0, nothing of a layer's residual is sent, and its gradients are dropped.

This holds for an optimizer that moves weights by multiples of its updates: SGD, or directions of Adam.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
# A layer's residual shrinks where its rate is more than so many times the mean rate of its gradients; the steps of that mean.
LEAP, MEAN_OF = 4.0, 64
# A rate that changes by more between an exchange and the step is the one that the residual has.
LATE = 2.0
# A mean rate that differs by less from the rate is the rate.
CLOSE = 0.01
# The smallest factor that a kernel's float holds in full precision.
SMALLEST = 2.0**-126


@dataclass
class RatesState:
    """rates: of the layers, under which the residual was found. means: by number, of layers with another mean rate.

    kept: the parts of the residual that a step does not send.
    """

    rates: Rates = None
    means: dict[int, float] = field(default_factory=dict)
    kept: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # in the residual, and the copy
    leapt_in: int = -1  # the last step after whose exchange a rate leapt

    def note_late(self, rates: tuple[float, ...], is_linear: bool, step: int) -> None:
        """Note the rates that the optimizer steps with, where they leap after the exchange, or where none was known in it.

        A program that sets them after backward() in each step would otherwise have each residual sent by the next rate, after
        a factor for the last one. Rates of a schedule hardly differ, and the factors of all steps are one schedule's. One leap,
        as of a warm restart, is the schedule's, too: without its factor the residual would stay as long as under the low rate.
        """
        if self.rates is None:
            self.rates = rates if is_linear else None
            return
        leaps = [_is_known(a) and _is_known(b) and max(a / b, b / a) > LATE for a, b in zip(self.rates, rates, strict=True)]
        if any(leaps):
            if self.leapt_in == step - 1:
                self.rates = tuple([b if leap else a for a, b, leap in zip(self.rates, rates, leaps, strict=True)])
            self.leapt_in = step


class RateCorrection(Stage):
    """Multiplies the residual by old / new where the learning rate changes."""

    name: ClassVar[str] = "rates"

    def init(self, layout: Layout, seed: int) -> RatesState:
        return RatesState()

    def prepare(self, accumulation: Accumulation, state: RatesState, context: StepContext) -> None:
        rates = context.own_rates(accumulation.layout)
        # An update that is larger than its gradients may be too large for float16.
        if rates is not None and torch.float16 in [grad.dtype for grad in accumulation.grads]:
            rates = None
        idle = [layer for layer, rate in enumerate(rates) if rate == 0] if rates is not None and 0 in rates else []
        parts = [accumulation.residual[slice(*span)] for span in accumulation.layout.spans_of(idle)] if idle else []
        state.kept = [(part, part.clone()) for part in parts]
        if rates is not None and len(idle) == len(rates):
            accumulation.residual_factor, accumulation.residual_is_kept = 0.0, True
            return
        factor, of_layers = _factors(state, rates)
        if factors := {**of_layers, **dict.fromkeys(idle, 0.0)}:
            views = accumulation.residual.split(accumulation.layout.sizes)
            torch._foreach_mul_([views[layer] for layer in factors], [*factors.values()])
        decay = accumulation.residual_factor
        accumulation.residual_factor = factor * decay
        accumulation.layer_factors = {layer: own * decay for layer, own in factors.items()}

    def around(self, steps: Steps, accumulation: Accumulation, state: RatesState, world: World) -> Steps:
        return _with_residual_back(steps, state, accumulation.residual_is_kept) if state.kept else steps

    def save(self, state: RatesState, layout: Layout, copy: Copy) -> Part:
        rates = zip(layout.names, state.rates or (), strict=False)
        means = {"mean rate": {layout.names[layer]: mean for layer, mean in state.means.items()}} if state.means else {}
        return Part({"rate": {name: max(rate, 0.0) for name, rate in rates if rate != ANY}, **means})

    def load(self, state: RatesState, layout: Layout, shares: Shares) -> Callable[[], None]:
        def copy() -> None:
            if shares.own:
                state.rates = tuple(known.get(name, ANY) for name in layout.names) if known else None
                state.means = {layer: means[name] for layer, name in enumerate(layout.names) if name in means}

        known, means = (_of_layers(shares, field, layout) for field in ("rate", "mean rate"))
        return copy


def _of_layers(shares: Shares, field: str, layout: Layout) -> dict[str, float]:
    """Read a number of each layer from the share that the rank goes on with."""
    theirs = saved.table_or_empty(shares.own[0].layers, field) if shares.own else {}
    return {name: saved.number(theirs, name) for name in layout.names if name in theirs}


def _factors(state: RatesState, rates: Rates) -> tuple[float, Mapping[int, float]]:
    """Note a step's rates. Return the factor of the residual, and those of single layers, by number, where it is 1.

    Where the rate of a layer is unknown, or those of a bucket's layers change unlike each other, none grows: one that grew by
    itself would push others out of a selection by magnitude. One shrinks if its rate leaps. A rate that swings does not:
    without the growth, its residual would wither. A rate of 0 changes nothing: the layer's residual keeps the last one.
    """
    before = state.rates
    if before is None or rates is None:
        state.rates = rates
        state.means.clear()
        return 1.0, {}
    if rates == before and not state.means:
        return 1.0, {}
    state.rates = tuple(new if _is_known(new) else old for old, new in zip(before, rates, strict=True))
    pairs = {i: pair for i, pair in enumerate(zip(before, rates, strict=True)) if pair[0] != ANY and pair[1] != 0}
    factors = {i: old / new for i, (old, new) in pairs.items() if _is_known(old) and _is_known(new)}
    if not factors:
        return 1.0, {}
    factor, largest = 1.0, max(factors.values())
    if is_alike := len(factors) == len(pairs) and largest <= (1 + ALIKE) * min(factors.values()):
        factor = min(max(largest, SMALLEST), LARGEST)
        means = {i: mean / factor for i, mean in state.means.items() if i in factors}
    else:
        means = {i: state.means.get(i, before[i]) for i, own in factors.items() if own != 1 or i in state.means}
    leaps = {} if is_alike else {i: max(mean / rates[i], SMALLEST) for i, mean in means.items() if rates[i] > LEAP * mean}
    state.means = {i: mean for i, mean in state.means.items() if i not in means}  # of layers of rate 0, for example
    for i in means.keys() - leaps.keys():
        mean = means[i] + (rates[i] - means[i]) / MEAN_OF
        if abs(mean - rates[i]) > CLOSE * rates[i]:
            state.means[i] = mean
    return factor, leaps


def _with_residual_back(steps: Steps, state: RatesState, of_all: bool) -> Steps:
    """Exchange without layers of rate 0, or the gradients of all layers, and restore their residual. of_all: all have it."""
    for part, _ in state.kept if not of_all else ():
        part.zero_()
    update = yield from steps
    for part, copy in state.kept:
        part.copy_(copy)
    state.kept.clear()
    return update


def _is_known(rate: float) -> bool:
    return 0 < rate < math.inf
