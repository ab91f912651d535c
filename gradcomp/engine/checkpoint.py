"""Checkpoints: residuals and velocities by layer, and each compressor's own state by bucket."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradcomp.engine.by_layer import ByLayer
from gradcomp.engine.feedback import Collector, Feedback
from gradcomp.engine.reducer import Reducer
from gradcomp.protocol import Compressor

# The format of a state. Increase it when a state's content or a knob's default changes.
FORMAT = 3


def residual(reducer: Reducer) -> dict[str, Tensor]:
    """Copy the residual of every layer, flat. It is zero where there is no error feedback."""
    zeros = {name: torch.zeros(layer.size, device=layer.device) for name, layer in reducer.layers.items()}
    return zeros | _copies(reducer, "residual")


def save(reducer: Reducer) -> dict[str, Any]:
    """Copy all that the next step depends on."""
    return {
        "steps": reducer.steps_done,
        "residual": _copies(reducer, "residual"),
        "velocity": _copies(reducer, "velocity"),
        "buckets": [{"layers": bucket.layout.names, "own": bucket.collector.save(bucket.state)} for bucket in reducer.buckets],
    }


def load(reducer: Reducer, state: Mapping[str, Any]) -> None:
    """Restore a state that save() made for the same layers and the same spec.

    Residuals and velocities are restored by layer. A compressor's state is restored only if a bucket has the same layers. Other
    buckets keep the state that they have.
    """
    pairs = [*_pairs(reducer, "residual", state["residual"]), *_pairs(reducer, "velocity", state["velocity"])]
    for view, saved_view in pairs:  # nothing is written before all of the state is known to fit
        view.copy_(saved_view)
    reducer.steps_done = state["steps"]
    saved = {tuple(bucket["layers"]): bucket["own"] for bucket in state["buckets"]}
    for bucket in reducer.buckets:
        bucket.state.steps = reducer.steps_done
        if saved_bucket := saved.get(bucket.layout.names):
            bucket.collector.load(bucket.state, saved_bucket)


def successor(compressor: Compressor, old: Reducer) -> Compressor:
    """Prepare a compressor to follow an old reducer: add error feedback if the old one has residuals to carry over."""
    if not old.keeps_residual:
        return compressor
    if isinstance(compressor, Collector):
        if not compressor.keeps_residual:
            raise ValueError(
                f"{compressor} would lose the residual, which has not been sent yet; use a spec with error feedback"
            )
        return compressor
    if isinstance(compressor, ByLayer):
        rules = tuple((pattern, successor(chosen, old)) for pattern, chosen in compressor.rules)
        return ByLayer(rules, successor(compressor.default, old))
    return Feedback(compressor)


def carry(old: Reducer, new: Reducer) -> None:
    """Copy residuals, and velocities if both keep them, from one reducer to another with the same layers."""
    for array in ("residual", "velocity"):
        copies = _copies(old, array)
        for name, view in _views(new, array).items():
            if name in copies:
                view.copy_(copies[name])
    new.steps_done = old.steps_done


def stamp(spec: str, **state: Any) -> dict[str, Any]:
    """Add the format and the spec to a state, for check_stamp()."""
    return {"format": FORMAT, "spec": spec, **state}


def check_stamp(state: Mapping[str, Any], spec: str) -> None:
    """Refuse a state of another spec, or of a version of gradcomp with another format."""
    if state.get("format") != FORMAT:
        raise ValueError(
            f"the state has format {state.get('format', 1)}, but this gradcomp reads format {FORMAT}: another version saved "
            "it; continue with that version, or without the state"
        )
    if state["spec"] != spec:
        saved = state["spec"]
        raise ValueError(f"the state was saved with {saved!r} and cannot continue with {spec!r}; use the same spec: {saved!r}")


def _views(reducer: Reducer, array: str) -> dict[str, Tensor]:
    """Slice residuals or velocities into layers, by name. Buckets that do not keep the array between steps are left out."""
    views: dict[str, Tensor] = {}
    for bucket in reducer.buckets:
        flat: Tensor | None = getattr(bucket.state, array)
        if flat is not None and (bucket.collector.keeps_residual or array == "velocity"):
            views |= bucket.layout.views(flat)
    return views


def _copies(reducer: Reducer, array: str) -> dict[str, Tensor]:
    return {name: view.clone() for name, view in _views(reducer, array).items()}


def _pairs(reducer: Reducer, array: str, saved: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Pair each layer's array with the saved one. Refuse a state that does not fit the layers."""
    views = _views(reducer, array)
    if different := sorted(views.keys() ^ saved.keys()):
        raise ValueError(
            f"the state does not fit the model: only one of them has {', '.join(different[:3])}; load it into the model that "
            "saved it"
        )
    for name, view in views.items():
        if view.numel() != saved[name].numel():
            raise ValueError(
                f"the state does not fit the model: {name!r} has {view.numel()} entries, in the state {saved[name].numel()}; "
                "load it into the model that saved it"
            )
    return [(view, saved[name]) for name, view in views.items()]
