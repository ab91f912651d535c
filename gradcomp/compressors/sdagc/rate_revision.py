"""Learning-rate revision: what a falling learning rate, or the time that an entry waited, changes.

density: fewer entries are sent as the rate falls. staleness, per_layer: sent entries are divided by the steps that they waited.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradcomp.messages.codec import Entries

REVISIONS = ("none", "density", "staleness", "per_layer")
# The revisions that need the steps that entries waited.
AGE_REVISIONS = ("staleness", "per_layer")


class Ages:
    """The step in which each entry of a bucket was last sent. Only the taken entries are read and written."""

    def __init__(self, n: int, ends: Tensor):
        self.n = n
        self.ends = ends
        self.last_sent = torch.zeros(n + 1, dtype=torch.int32, device=ends.device)  # the last one serves unused slots

    def divide(self, taken: Entries, step: int, by_layer: bool) -> None:
        """Divide the taken entries by the steps that they waited: each by its own, or by the mean over its layer's entries."""
        used = torch.arange(taken.values.numel(), device=taken.values.device) < taken.header[0]
        places = torch.where(used, taken.indices, self.n).long()
        waited = (step - self.last_sent[places]).float()
        if by_layer:
            layers = torch.bucketize(places, self.ends, right=True)
            sums = torch.zeros(self.ends.numel() + 1, device=waited.device).index_add_(0, layers, waited * used)
            counts = torch.zeros_like(sums).index_add_(0, layers, used.float())
            waited = (sums / counts.clamp(min=1))[layers]
        taken.values.copy_(torch.where(used, taken.values / waited.clamp(min=1), 0.0))
        self.last_sent[places] = step
