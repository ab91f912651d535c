"""How a layer's entries are distributed: the share beyond a threshold, if they are Laplace's, and moments over all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def laplace_density(lam: float) -> float:
    """Return the share of Laplace-distributed entries beyond lam standard deviations."""
    return math.exp(-math.sqrt(2) * lam)


def laplace_threshold(density: float) -> float:
    """Return the number of standard deviations beyond which this share of Laplace-distributed entries lies."""
    return -math.log(density) / math.sqrt(2)


def merge_moments(moments: Sequence[Tensor], rank: int, sizes: Tensor) -> Tensor:
    """Merge the layers' statistics of all ranks, in rank order. The smallest and the largest entry stay this rank's own."""
    all_ranks = torch.stack(list(moments))
    merged = all_ranks.mean(0)
    offsets = all_ranks[:, :, 0] - merged[:, 0]  # of the ranks' means
    merged[:, 1] += sizes * offsets.square().mean(0)
    merged[:, 2:4] = all_ranks[rank, :, 2:4]
    return merged
