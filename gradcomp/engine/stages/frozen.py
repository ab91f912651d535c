"""Frozen layers: their arrays are set aside while they are frozen, and come back afterwards.

Otherwise the residual of a layer that is frozen in mid-training would move it. This acts on the arrays of all stages.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch
from torch import Tensor

from gradcomp.core.compressor import Layout
from gradcomp.native.extension import LARGEST


class FrozenLayers:
    """The arrays of a bucket's frozen layers.

    residual: the bucket's. A sum of several ranks' may arrive in it while a layer is frozen; the other arrays stay as they are.
    """

    def __init__(self, layout: Layout, residual: Tensor):
        self._spans, self._residual = layout.spans, residual
        self._backups: dict[int, list[tuple[Tensor, Tensor]]] = {}  # by layer: each array, and the layer's part of it

    def __bool__(self) -> bool:
        return bool(self._backups)

    def set_aside(self, frozen: Sequence[int], arrays: Sequence[Tensor]) -> None:
        """Set the arrays of frozen layers aside, unless they are. The layers go on with zeros."""
        for layer in frozen:
            if layer not in self._backups:
                parts = [(array, array[slice(*self._spans[layer])]) for array in (self._residual, *arrays)]
                self._backups[layer] = [(array, part.clone()) for array, part in parts]
                for array, part in parts:
                    if array.dtype != torch.uint8:  # the steps of the last sends stay
                        part.zero_()

    def put_back(self, frozen: Container[int] = ()) -> None:
        """Put the arrays of all layers back, but for those that stay frozen."""
        for layer in [each for each in self._backups if each not in frozen]:
            for array, part in self._backups.pop(layer):
                own = array[slice(*self._spans[layer])]
                if array is self._residual:
                    own.add_(part).clamp_(-LARGEST, LARGEST)
                else:
                    own.copy_(part)

    def scale_residual(self, factor: float) -> None:
        """Multiply the residuals by the factor that a step applies to the others."""
        for parts in self._backups.values():
            for array, part in parts:
                if array is self._residual and factor not in (0, 1):
                    part.mul_(factor).clamp_(-LARGEST, LARGEST)

    def forget(self) -> None:
        """Forget the arrays that were set aside."""
        self._backups.clear()
