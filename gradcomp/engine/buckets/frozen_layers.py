"""Layers that were frozen in mid-training: what waits of them is set aside in each step, and acts again once they are unfrozen.

Without this, what waits of a frozen layer would go on to move it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.nn import Parameter

from gradcomp.engine.buckets.collector import BucketState
from gradcomp.protocol import Steps

log = logging.getLogger("gradcomp")


def set_aside(state: BucketState, frozen: Sequence[int], grads: Sequence[Tensor], of_residual: float) -> None:
    """Take what a bucket keeps of its frozen layers out of the arrays, until held() puts it back.

    frozen: the layers' numbers. grads: of all layers. of_residual: the factor that this step gives to all that waits.
    """
    state.set_aside = []
    arrays = (state.residual, state.velocity, state.second, state.sent_in)
    for array in arrays if frozen else ():
        parts = () if array is None else array.split([grad.numel() for grad in grads])
        for part in (parts[i] for i in frozen if parts):
            state.set_aside.append((part, part * of_residual if array is state.residual else part.clone()))
            if array is not state.sent_in:
                part.zero_()


def held(steps: Steps, state: BucketState) -> Steps:
    """Run an exchange, and put back what was set aside, also after a failure."""
    try:
        return (yield from steps)
    finally:
        for part, kept in state.set_aside:
            part.copy_(kept)
        state.set_aside = []


class FrozenLayers:
    """The parameters, by name, of which some may be frozen now, and a word about each change."""

    def __init__(self, parameters: Mapping[str, Parameter]):
        self._parameters = parameters
        self._known: set[str] = set()

    def of(self, names: Sequence[str]) -> list[int]:
        """Return the numbers of those among some layers that are frozen."""
        return [i for i, name in enumerate(names) if not self._parameters[name].requires_grad]

    def look(self, rank: int) -> None:
        """Tell of layers that were frozen since the last look."""
        frozen = {name for name, parameter in self._parameters.items() if not parameter.requires_grad}
        if new := sorted(frozen - self._known):
            more = f" and {len(new) - 1} more layers" if len(new) > 1 else ""
            log.warning(
                "gradcomp: rank %d: %r%s frozen since the exchange was set up: what waits there is kept until it is unfrozen, "
                "and this rank has no part in its updates. Freeze it on all ranks, or the others go on to move it on all",
                rank,
                new[0],
                f"{more} were" if more else " was",
            )
        self._known = frozen
