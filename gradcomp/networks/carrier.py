"""The carrier: the one number that Horovod reduces in a gradient's stead, chosen so that the result tells the operation."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def carrier(rank: int) -> Tensor:
    """What a rank gives: its number plus 2. (A 1 from all would come back as 1 from Average, Min, Max and Product alike.)"""
    return torch.tensor([rank + 2.0])


def scale(result: float, size: int) -> float:
    """What the mean is to be multiplied by: 1 for op=Average, the number of ranks for op=Sum; all else is refused."""
    results = {
        "Average": (size + 3) / 2,
        "Sum": size * (size + 3) / 2,
        "Min": 2.0,
        "Max": size + 1.0,
        "Product": math.prod(range(2, min(size, 30) + 2)),
    }
    op = next((op for op, expected in results.items() if math.isclose(result, expected, rel_tol=1e-4)), "")
    if not op:
        raise ValueError(
            "the gradients are reduced in a way gradcomp does not know, or the optimizer works in another process set than "
            "Compression(process_set=...) was given"
        )
    if op not in ("Average", "Sum"):
        raise ValueError(f"the gradients are reduced with op={op}, which cannot be compressed; use op=Average or op=Sum")
    return 1.0 if op == "Average" else float(size)
