"""What a reducer carries from step to step, by layer name, so that a checkpoint does not depend on how buckets were cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradcomp.reducer import Bucket, Reducer
from gradcomp.wrap import Feedback


def residual(reducer: Reducer) -> dict[str, Tensor]:
    """A copy of what has not been sent yet, flat, for every layer; zeros where there is no error feedback."""
    kept = {name: torch.zeros(layer.size, device=layer.device) for name, layer in reducer.layers.items()}
    if isinstance(reducer.source, Feedback):
        kept |= _by_layer(reducer, "value")
    return kept


def save(reducer: Reducer) -> dict[str, Any]:
    """Everything the next step depends on, in copies."""
    feedback = isinstance(reducer.source, Feedback)
    return {
        "steps": reducer.steps_done,
        "residual": _by_layer(reducer, "value") if feedback else {},
        "velocity": _by_layer(reducer, "velocity") if feedback else {},
    }


def load(reducer: Reducer, state: Mapping[str, Any]) -> None:
    """Puts back what save() gave, for the same layers and the same spec."""
    if isinstance(reducer.source, Feedback):
        _restore(reducer, "value", state["residual"])
        _restore(reducer, "velocity", state["velocity"])
    reducer.steps_done = state["steps"]


def same_spec(saved: str, present: str) -> None:
    """Refuses a state that another configuration left."""
    if saved != present:
        raise ValueError(f"the state was saved with {saved!r} and cannot continue with {present!r}; use the same spec")


def _views(bucket: Bucket, what: str) -> dict[str, Tensor]:
    flat: Tensor | None = getattr(bucket.memory, what)
    return {} if flat is None else bucket.layout.views(flat)


def _by_layer(reducer: Reducer, what: str) -> dict[str, Tensor]:
    return {name: view.clone() for bucket in reducer.buckets for name, view in _views(bucket, what).items()}


def _restore(reducer: Reducer, what: str, saved: Mapping[str, Tensor]) -> None:
    views = {name: view for bucket in reducer.buckets for name, view in _views(bucket, what).items()}
    if views.keys() != saved.keys():
        different = ", ".join(sorted(views.keys() ^ saved.keys())[:3])
        raise ValueError(
            f"the state is of another model: {different} {'is' if len(views.keys() ^ saved.keys()) == 1 else 'are'} not in both"
        )
    for name, view in views.items():
        if view.numel() != saved[name].numel():
            raise ValueError(
                f"the state is of another model: {name!r} has {view.numel()} entries, in the state {saved[name].numel()}"
            )
        view.copy_(saved[name])
