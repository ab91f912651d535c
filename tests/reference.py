"""The kernels' definitions in plain torch: slow, obvious, and what both twins are held to."""

from __future__ import annotations

import torch
from torch import Tensor


def flatten(grads: list[Tensor]) -> Tensor:
    return torch.cat([grad.reshape(-1).float() for grad in grads])


def accumulate(
    grads: list[Tensor], value: Tensor, velocity: Tensor | None, momentum: float, nesterov: bool
) -> tuple[Tensor, Tensor | None, int]:
    """The new value, the new velocity and the flag."""
    g = flatten(grads)
    if velocity is None:
        new = value + g
        good = new.isfinite()
        return torch.where(good, new, value), None, int(not good.all())
    u = momentum * velocity + g
    new = value + (g + momentum * u if nesterov else u)
    good = new.isfinite() & u.isfinite()
    return torch.where(good, new, value), torch.where(good, u, velocity), int(not good.all())


def topk(value: Tensor, k: int) -> Tensor:
    """The places of the k entries of largest magnitude, ties to the lower index, in index order."""
    return torch.sort(value.abs(), descending=True, stable=True).indices[:k].sort().values


def same(a: Tensor, b: Tensor) -> bool:
    """Equal to the last bit: NaNs, and the sign of zero, included."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
