"""Staleness of sparse entries: for how many steps each has gathered what it now sends."""

from __future__ import annotations

import torch
from torch import Tensor

from gradcomp.messages.sparse import Entries


class Ages:
    """When each entry of a bucket was last sent. It is touched only where something is taken."""

    def __init__(self, n: int, ends: Tensor):
        self.n = n
        self.ends = ends
        self.last = torch.zeros(n + 1, dtype=torch.int32, device=ends.device)  # the last one stands for unused room

    def revise(self, taken: Entries, step: int, by_layer: bool) -> None:
        """Divides what is sent by the steps it took to gather: each entry's own, or the mean over what its layer sends."""
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
