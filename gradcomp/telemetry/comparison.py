"""The comparison of a step with dense: of a sample of entries, the additions of all ranks to their residuals, and the update.

With the optimizer's momentum taken over, velocities or directions are added. They are compared, not gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradcomp.engine.bucket import Bucket
from gradcomp.engine.stages.adam import sampled_indices
from gradcomp.native.memory import Update

# The most entries of a bucket that are compared.
ENTRIES = 4096


class Comparison:
    """The comparison of one step on one rank. All ranks draw the same entries."""

    def __init__(self, step: int):
        self.step = step
        self._places: dict[int, Tensor] = {}
        self._weights: dict[int, Tensor] = {}
        self._added: dict[int, Tensor] = {}
        self._delivered: dict[int, Tensor] = {}

    def before(self, bucket: Bucket) -> None:
        """Draw the bucket's entries. Keep their residual."""
        residual, total = bucket.residual, bucket.layout.total
        places = sampled_indices(total, ENTRIES, bucket.seed % 2**40 + self.step, bucket.layout.device)
        self._places[bucket.index] = places
        self._weights[bucket.index] = torch.full_like(places, residual.numel() / len(places), dtype=torch.float64)
        self._added[bucket.index] = residual.index_select(0, places)

    def collected(self, bucket: Bucket) -> None:
        """Keep the addition to the residual."""
        kept = bucket.residual_factor if bucket.keeps_residual else 0.0
        now = bucket.residual.index_select(0, self._places[bucket.index])
        self._added[bucket.index] = now - kept * self._added[bucket.index]

    def delivered(self, bucket: Bucket, update: Update) -> None:
        """Keep the update."""
        self._delivered[bucket.index] = update.flat.index_select(0, self._places[bucket.index])

    def joined_added(self) -> Tensor:
        """Join the additions of this rank, in the order of the buckets."""
        return _join(self._added)

    def figures(self, mean: Tensor) -> Tensor:
        """Return the cosine of the angle to dense, and the error relative to dense. mean: the mean of all ranks' additions."""
        delivered, weight, dense = _join(self._delivered).double(), _join(self._weights), mean.double()
        squares = (weight * dense.square()).sum()
        cosine = (weight * dense * delivered).sum() / (squares * (weight * delivered.square()).sum()).sqrt()
        error = ((weight * (delivered - dense).square()).sum() / squares).sqrt()
        return torch.stack([cosine, error])


def _join(arrays: dict[int, Tensor]) -> Tensor:
    """Join arrays of several devices on the first one's."""
    ordered = [arrays[index] for index in sorted(arrays)]
    return torch.cat([array.to(ordered[0].device) for array in ordered])
