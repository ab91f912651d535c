"""Values added back to a residual whose entries stay within the largest magnitude."""

from __future__ import annotations

import torch
from torch import Tensor

from gradcomp.native.extension import LARGEST


def add_within_largest(residual: Tensor, places: Tensor, values: Tensor) -> None:
    """Add values at these places, of which only those with the value 0 may repeat. The excess of a sum is lost.

    A value in double precision may be larger than the largest magnitude: it is then added in halves.
    """
    waiting = residual.index_select(0, places).double()
    added = (waiting + values).clamp(-LARGEST, LARGEST) - waiting
    first = torch.where(added.abs() > LARGEST, added / 2, added)
    for part in (first, added - first):
        residual.index_add_(0, places, part.float())
