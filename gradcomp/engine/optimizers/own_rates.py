"""Learning rates of what waits: an entry acts with the rate of the step in which it was found.

The optimizer multiplies an update by its rate of the moment. A residual that was found under another rate is therefore
multiplied by old / new whenever the rate changes. Weights then move by the rates that every gradient came with, as they do
without compression. In a step with the rate 0, nothing of the residual is sent, and its gradients do not wait.

This holds for an optimizer that moves weights by multiples of its updates: SGD, or directions of Adam.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from gradcomp.core.compressor import Steps
from gradcomp.engine.buckets.bucket import Bucket
from gradcomp.engine.buckets.collector import BucketState
from gradcomp.engine.context import ANY, Rates
from gradcomp.native.extension import LARGEST

# Factors of layers that differ by less are one: schedulers multiply rates of the groups one by one, and each is rounded.
ALIKE = 1e-6
# The smallest factor that a kernel's float holds in full precision.
SMALLEST = 2.0**-126


def begin(state: BucketState, rates: Rates) -> float:
    """Note a step's rates, and return the factor of the residual.

    It is 1 where the rate of a layer is unknown, and where those of a bucket's layers change unlike each other: layers with a
    factor of their own would push others out of a selection by magnitude. A rate of 0 changes nothing: what waits of the layer
    keeps the last one. The factor is 0 where all rates are: the residual is held meanwhile.
    """
    before = state.rates
    state.held = None
    if rates is not None and not any(rates):
        state.held = state.residual.clone()
        return 0.0
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


def held(steps: Steps, state: BucketState) -> Steps:
    """Exchange a step's gradients alone, and put the residual back that waits meanwhile."""
    update = yield from steps
    assert state.held is not None
    state.residual.copy_(state.held)
    state.held = None
    return update


def note(buckets: Iterable[Bucket], rates: Callable[[Sequence[str]], Rates]) -> None:
    """Note the rates that the last step's residuals were found under, where nobody knew them then."""
    for bucket in buckets:
        if bucket.state.rates is None:
            bucket.state.rates = rates(bucket.layout.names)


def _is_known(rate: float) -> bool:
    return 0 < rate < math.inf
