"""Clipping: each rank's own gradient is cut to a norm before it is added to the residual."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradcomp.core.compressor import Layout
from gradcomp.engine.context import StepContext
from gradcomp.engine.stages.stage import Accumulation, Stage
from gradcomp.native import kernels


@dataclass(frozen=True)
class Clip(Stage):
    """Cuts each layer's gradient to norm / sqrt(ranks). The state holds the sum of squares of each layer.

    whole_model: all layers count as one.
    """

    name: ClassVar[str] = "clip"
    norm: float
    whole_model: bool

    def init(self, layout: Layout, seed: int) -> Tensor:
        return torch.zeros(len(layout.names), dtype=torch.float64, device=layout.device)

    def prepare(self, accumulation: Accumulation, state: Tensor, context: StepContext) -> None:
        kernels.sum_squares(accumulation.grads, state, accumulation.memory)
        # A layer with an entry that is not finite has no norm. Its finite entries go to the residual.
        state.nan_to_num_(0.0, 0.0, 0.0)
        norms = state.sum().sqrt().expand_as(state) if self.whole_model else state.sqrt()
        if accumulation.loss_scale is not None:
            norms = norms / accumulation.loss_scale
        accumulation.scales = (self.norm / math.sqrt(context.ranks) / (norms + 1e-6)).clamp(max=1).float()
