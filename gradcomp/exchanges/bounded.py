"""Values added back to a residual whose entries stay within the largest magnitude."""

from __future__ import annotations

from torch import Tensor

from gradcomp.native.extension import LARGEST


def add_within_largest(residual: Tensor, places: Tensor, values: Tensor) -> None:
    """Add values at these places, of which only those with the value 0 may repeat. The excess of a sum is lost."""
    waiting, values = residual.index_select(0, places), values.clamp(-LARGEST, LARGEST)
    residual.index_add_(0, places, values.clamp(-LARGEST - waiting, LARGEST - waiting))
