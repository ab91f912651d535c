"""Learning-rate revision: what a changing or late learning rate does to what waits.

keep, rescale: the residual is multiplied when a layer's rate changes. density: fewer entries are sent as the rate falls.
staleness, per_layer: what is sent is divided by the steps that it waited.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradcomp.messages.sparse import Entries

REVISIONS = ("none", "keep", "rescale", "density", "staleness", "per_layer")
OF_RATES = ("keep", "rescale", "density")
"""Those that have to know the learning rates."""
WAITING = ("staleness", "per_layer")
"""Those that have to know how long entries waited."""


def rescale(
    how: str, flats: Sequence[Tensor | None], begins: Sequence[int], before: Sequence[float], now: Sequence[float]
) -> None:
    """Multiply what waits of each layer whose rate has changed.

    keep: what waits keeps the rate it was found under. rescale: it shrinks and grows with the rate once more.
    """
    for i, (old, new) in enumerate(zip(before, now, strict=True)):
        if old != new and old > 0 and new > 0:
            factor = old / new if how == "keep" else new / old
            for flat in flats:
                if flat is not None:
                    flat[begins[i] : begins[i + 1]] *= factor


class Ages:
    """When each entry of a bucket was last sent. It is touched only where something is taken."""

    def __init__(self, n: int, ends: Tensor):
        self.n = n
        self.ends = ends
        self.last = torch.zeros(n + 1, dtype=torch.int32, device=ends.device)  # the last one stands for unused room

    def revise(self, taken: Entries, step: int, by_layer: bool) -> None:
        """Divide what is sent by the steps it took to gather: each entry's own, or the mean over what its layer sends."""
        there = torch.arange(taken.values.numel(), device=taken.values.device) < taken.header[0]
        places = torch.where(there, taken.indices, self.n).long()
        waited = (step - self.last[places]).float()
        if by_layer:
            layers = torch.bucketize(places, self.ends, right=True)
            sums = torch.zeros(self.ends.numel() + 1, device=waited.device).index_add_(0, layers, waited * there)
            counts = torch.zeros_like(sums).index_add_(0, layers, there.float())
            waited = (sums / counts.clamp(min=1))[layers]
        taken.values.copy_(torch.where(there, taken.values / waited.clamp(min=1), 0.0))
        self.last[places] = step
