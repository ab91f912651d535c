"""The arrays that buckets keep between steps, cut into layers: residuals and moments."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping

import torch
from torch import Tensor

from gradcomp.engine.buckets import frozen_layers
from gradcomp.engine.context import ANY
from gradcomp.engine.steps.reducer import Reducer

# The moments that are kept in the optimizer's place, once it has them; and all arrays.
OF_OPTIMIZER = ("velocity", "second")
ARRAYS = ("residual", *OF_OPTIMIZER)


def views(reducer: Reducer, array: str) -> dict[str, Tensor]:
    """Slice residuals or moments into layers, by name. Buckets that do not keep the array between steps are left out.

    What is set aside of frozen layers is put back before; the next step sets it aside again.
    """
    views: dict[str, Tensor] = {}
    for bucket in reducer.buckets:
        frozen_layers.put_back(bucket.state)
        flat: Tensor | None = getattr(bucket.state, array)
        if flat is not None and (bucket.collector.keeps_residual or array in OF_OPTIMIZER):
            views |= bucket.layout.views(flat)
    return views


def copies(reducer: Reducer, array: str, copy: Callable[[Tensor], Tensor] = Tensor.clone) -> dict[str, Tensor]:
    """Copy residuals or moments, by layer."""
    return {name: copy(view) for name, view in views(reducer, array).items()}


def later_moments(reducer: Reducer) -> dict[str, torch.Size]:
    """Return the layers whose moments are made once the optimizer has some, with the moments' shapes."""
    layouts = [bucket.layout for bucket in reducer.buckets if bucket.collector.takes_momentum]
    return {name: torch.Size([size]) for layout in layouts for name, size in zip(layout.names, layout.sizes, strict=True)}


def make_moments(reducer: Reducer, array: str, names: Container[str]) -> None:
    """Make a moment of these layers, where the optimizer's momentum would."""
    for bucket in reducer.buckets:
        missing = bucket.collector.takes_momentum and getattr(bucket.state, array) is None
        if missing and any(name in names for name in bucket.layout.names):
            setattr(bucket.state, array, torch.zeros_like(bucket.state.residual))


def rates(reducer: Reducer) -> dict[str, float]:
    """Return the learning rate that each layer's residual is meant for, where it is known."""
    found: dict[str, float] = {}
    for bucket in reducer.buckets:
        found |= zip(bucket.layout.names, bucket.state.rates or (), strict=False)
    return {name: max(rate, 0.0) for name, rate in found.items() if rate != ANY}


def set_rates(reducer: Reducer, known: Mapping[str, float]) -> None:
    """Set the learning rates that residuals are meant for. Of a layer without one, nothing waits yet."""
    for bucket in reducer.buckets:
        names = bucket.layout.names
        bucket.state.rates = tuple(known.get(name, ANY) for name in names) if any(name in known for name in names) else None


def adam_steps(reducer: Reducer) -> int:
    """Return the steps that Adam's moments have seen."""
    return max((bucket.state.steps_of_adam() for bucket in reducer.buckets), default=0)
