"""Clipping of a rank's own gradients, before they wait."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from gradcomp.engine.context import StepContext
from gradcomp.native import kernels


def scales(grads: Sequence[Tensor], squares: Tensor, norm: float, of_model: bool, context: StepContext) -> Tensor:
    """Compute the factor of each layer's gradient that clips its norm to norm / sqrt(ranks).

    squares: gets the sum of squares of each layer. of_model: all layers count as one.
    """
    kernels.sum_squares(grads, squares, context.memory)
    # The norm of a layer with an entry that is not finite is none. Its finite entries wait.
    squares.nan_to_num_(0.0, 0.0, 0.0)
    norms = squares.sum().sqrt().expand_as(squares) if of_model else squares.sqrt()
    if (loss_scale := context.loss_scale(squares.device)) is not None:
        norms = norms / loss_scale
    return (norm / math.sqrt(context.ranks) / (norms + 1e-6)).clamp(max=1).float()
