"""A rank's own gradients, which an exchange of updates leaves alone: their norm, and whether they are finite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradcomp.native import kernels
from gradcomp.native.memory import Memory


class _Place(NamedTuple):
    """The sums of squares of some gradients of a pass, and scratch for them."""

    sizes: list[int]
    squares: Tensor
    scratch: Tensor | None


class LocalGradients:
    """The sum of squares of a backward pass, where the gradients lie. Nothing waits for a device.

    scaler: the GradScaler that scales the loss, or None.
    """

    def __init__(self, memory: Memory):
        self._memory = memory
        self._places: list[_Place] = []
        self._noted = 0
        self._total: Tensor | None = None
        self._scale: Tensor | None = None  # of the loss in the last pass
        self.scaler: Any = None

    def add(self, grads: Sequence[Tensor]) -> Tensor:
        """Add gradients of one device to those of the pass under way. Return their sums of squares."""
        sizes = [*map(torch.Tensor.numel, grads)]
        place = self._places[self._noted] if self._noted < len(self._places) else None
        if place is None or place.sizes != sizes:
            squares = torch.zeros(len(grads), dtype=torch.float64, device=grads[0].device)
            place = _Place(sizes, squares, kernels.scratch_of_squares(grads, squares))
            self._places[self._noted : self._noted + 1] = [place]
        self._noted += 1
        kernels.sum_squares(grads, place.squares, self._memory, place.scratch)
        return place.squares

    def end(self) -> Tensor | None:
        """End the pass. Return 0 if its gradients are finite, otherwise Inf or NaN, as one float; None if there were none."""
        if not (noted := self._noted):
            return None
        every, self._noted = [each.squares for each in self._places[:noted]], 0
        all_squares = every[0] if noted == 1 else torch.cat([each.to(every[0].device) for each in every])
        self._total = all_squares.sum()
        scale = getattr(self.scaler, "_scale", None)  # in public only as a number, for which a GPU would be waited for
        self._scale = None if scale is None else scale.clone()
        return torch.where(self._total.isfinite(), 0.0, self._total).float()

    def discard(self) -> None:
        """Forget the pass under way."""
        self._noted = 0

    @property
    def norm(self) -> float | None:
        """The norm of the last pass's gradients; None before the first. This waits for a device."""
        if self._total is None:
            return None
        return math.sqrt(float(self._total)) / (1.0 if self._scale is None else float(self._scale))
