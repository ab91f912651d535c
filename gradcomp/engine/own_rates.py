"""Learning rates of what waits: an entry acts with the rate of the step in which it was found.

The optimizer multiplies an update by its rate of the moment. A residual that was found under another rate is therefore
multiplied by old / new whenever the rate changes. Weights then move by the rates that every gradient came with, as they do
without compression.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gradcomp.engine.collector import BucketState, Rates
from gradcomp.native.extension import LARGEST

# Factors of layers that differ by less are one: schedulers multiply rates of the groups one by one, and each is rounded.
ALIKE = 1e-6
# The smallest factor that a kernel's float holds in full precision.
SMALLEST = 2.0**-126


def begin(state: BucketState, rates: Rates, layers: Sequence[Tensor]) -> float:
    """Note a step's rates, and return the factor of the whole residual. Layers with factors of their own get them here.

    A rate that is 0 or unknown changes nothing: what waits is meant for the last one before it. layers: arrays of their sizes.
    """
    if rates is None:
        return 1.0
    before, state.rates = state.rates, rates
    if before is None or before == rates:
        return 1.0
    state.rates = tuple(new if new > 0 else old for old, new in zip(before, rates, strict=True))
    factors = [old / new if old > 0 else 1.0 for old, new in zip(before, state.rates, strict=True) if new > 0]
    if len(factors) == len(rates) and max(factors) <= (1 + ALIKE) * min(factors):
        return _held(factors[0])
    for view, old, new in zip(state.residual.split([each.numel() for each in layers]), before, state.rates, strict=True):
        if old != new and old > 0 and new > 0:
            view.mul_(_held(old / new)).clamp_(-LARGEST, LARGEST)
    return 1.0


def _held(factor: float) -> float:
    """Return the factor as a kernel's float holds it."""
    return min(max(factor, SMALLEST), LARGEST)
