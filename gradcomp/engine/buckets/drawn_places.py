"""Places of a bucket's entries drawn at random, the same on all ranks, where some stand for all."""

from __future__ import annotations

import torch
from torch import Tensor


def draw(n: int, count: int, seed: int, device: torch.device) -> Tensor:
    """Draw about as many of n places, in ascending order; all of them if they are no more than that."""
    if n <= count:
        return torch.arange(n, device=device)
    return torch.randint(n, (count,), generator=torch.Generator().manual_seed(seed)).sort().values.to(device)
