"""Layers that were frozen in mid-training: their arrays are set aside while they are frozen, and come back afterwards.

Otherwise the residual of a frozen layer would move it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from gradcomp.engine.buckets.collector import Aside, BucketState
from gradcomp.native.extension import LARGEST

# The arrays of a bucket that are set aside.
ARRAYS = ("residual", "velocity", "second")


def set_aside(state: BucketState, frozen: Sequence[int], grads: Sequence[Tensor], of_residual: float) -> None:
    """Set the arrays of frozen layers aside, unless they are. The layers go on with zeros.

    grads: of all layers. of_residual: the factor that is due to all that waits in this step.
    """
    for layer in frozen:
        if layer in state.aside:
            continue
        begin = sum(grad.numel() for grad in grads[:layer])
        entries = slice(begin, begin + grads[layer].numel())
        kept = state.aside[layer] = Aside(entries, {}, of_residual)
        for name in ARRAYS:
            if (array := getattr(state, name)) is not None:
                kept.arrays[name] = array[entries].clone()
                array[entries].zero_()
        if state.held is not None:  # the step's residual is another one
            kept.arrays["residual"].copy_(state.held[entries])
            state.held[entries].zero_()


def put_back(state: BucketState, frozen: Collection[int] = ()) -> None:
    """Add what was set aside to the arrays, but for the layers that stay frozen.

    An entry that comes back with a residual has waited.
    """
    for layer in [each for each in state.aside if each not in frozen]:
        kept = state.aside.pop(layer)
        for name, part in kept.arrays.items():
            if (array := getattr(state, name)) is not None:
                factor = kept.of_residual if name == "residual" else 1.0
                array[kept.entries].add_(part, alpha=factor).clamp_(-LARGEST, LARGEST)
        if state.sent_in is not None:
            state.sent_in[kept.entries].masked_fill_(kept.arrays["residual"] != 0, (state.steps - 1) % 256)


def follow_rates(state: BucketState, of_residual: float) -> None:
    """Note the factor of what waits in a step: it is that of what is set aside, too."""
    for kept in state.aside.values():
        kept.of_residual *= of_residual
