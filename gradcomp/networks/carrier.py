"""The carrier: the number that Horovod reduces in place of a gradient. Its reduced value reveals the operation."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def carrier(rank: int) -> Tensor:
    """Make a rank's carrier: the rank plus 2. (If all gave 1, Average, Min, Max and Product would all give 1 back.)"""
    return torch.full((1,), rank + 2.0)


def scale(result: float, size: int) -> float:
    """Return the op's result over the mean: 1 for op=Average, the number of ranks for op=Sum. Refuse other ops."""
    for scale in (1.0, float(size)):
        if math.isclose(result, scale * (size + 3) / 2, rel_tol=1e-4):
            return scale
    others = {"Min": 2.0, "Max": size + 1.0, "Product": math.prod(range(2, min(size, 30) + 2))}
    op = next((op for op, expected in others.items() if math.isclose(result, expected, rel_tol=1e-4)), "")
    if not op:
        raise ValueError(
            f"the optimizer reduced a carrier to {result}, which fits neither op=Average nor op=Sum over {size} ranks; use one "
            "of these, and give hvd.DistributedOptimizer and Compression the same process set"
        )
    raise ValueError(f"the optimizer reduces gradients with op={op}, which cannot be compressed; use op=Average or op=Sum")
