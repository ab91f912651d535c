"""What a reducer carries from step to step, by layer name, so that a checkpoint does not depend on how buckets were cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradcomp.engine.by_layer import ByLayer
from gradcomp.engine.feedback import Feedback, Source
from gradcomp.engine.reducer import Bucket, Reducer
from gradcomp.protocol import Compressor

FORMAT = 3
"""Raised when the content of a state changes, or what a saved spec means: the default of a knob."""


def residual(reducer: Reducer) -> dict[str, Tensor]:
    """A copy of what has not been sent yet, flat, for every layer; zeros where there is no error feedback."""
    kept = {name: torch.zeros(layer.size, device=layer.device) for name, layer in reducer.layers.items()}
    return kept | _by_layer(reducer, "residual")


def save(reducer: Reducer) -> dict[str, Any]:
    """Everything the next step depends on, in copies."""
    return {
        "steps": reducer.steps_done,
        "residual": _by_layer(reducer, "residual"),
        "velocity": _by_layer(reducer, "velocity"),
        "buckets": [{"layers": bucket.layout.names, "own": bucket.source.save(bucket.state)} for bucket in reducer.buckets],
    }


def load(reducer: Reducer, state: Mapping[str, Any]) -> None:
    """Put back what save() gave, for the same layers and the same spec.

    Residuals and velocities go to their layers however the buckets are cut; what a compressor keeps for a bucket as a whole
    comes back where the cut is the same, and is found anew where it is not.
    """
    kept = [*_matched(reducer, "residual", state["residual"]), *_matched(reducer, "velocity", state["velocity"])]
    for view, saved_view in kept:  # once all of it is known to fit
        view.copy_(saved_view)
    reducer.steps_done = state["steps"]
    saved = {tuple(own["layers"]): own["own"] for own in state["buckets"]}
    for bucket in reducer.buckets:
        bucket.state.steps = reducer.steps_done
        if own := saved.get(bucket.layout.names):
            bucket.source.load(bucket.state, own)


def carrying(compressor: Compressor, old: Reducer) -> Compressor:
    """The compressor to change to: with error feedback, if there is a residual to be carried over."""
    if not any(bucket.source.keeps for bucket in old.buckets):
        return compressor
    if isinstance(compressor, Source):
        if not compressor.keeps:
            raise ValueError(f"{compressor} would lose what has not been sent yet; change to a spec with error feedback")
        return compressor
    if isinstance(compressor, ByLayer):
        rules = tuple((pattern, carrying(own, old)) for pattern, own in compressor.rules)
        return ByLayer(rules, carrying(compressor.default, old))
    return Feedback(compressor)


def carry(old: Reducer, new: Reducer) -> None:
    """Hand residuals, and velocities where both keep them, from one spec's reducer to another's for the same layers."""
    for what in ("residual", "velocity"):
        kept = _by_layer(old, what)
        for name, view in _all_views(new, what).items():
            if name in kept:
                view.copy_(kept[name])
    new.steps_done = old.steps_done


def stamped(spec: str, **state: Any) -> dict[str, Any]:
    """A state with what tells whether it can be continued."""
    return {"format": FORMAT, "spec": spec, **state}


def check_stamp(state: Mapping[str, Any], spec: str) -> None:
    """Refuse a state that another configuration left, or a gradcomp that wrote states in another way."""
    if state.get("format") != FORMAT:
        raise ValueError(
            f"the state has format {state.get('format', 1)}, but this gradcomp reads format {FORMAT}: another version saved it"
        )
    if state["spec"] != spec:
        saved = state["spec"]
        raise ValueError(f"the state was saved with {saved!r} and cannot continue with {spec!r}; use the same spec: {saved!r}")


def _views(bucket: Bucket, what: str) -> dict[str, Tensor]:
    flat: Tensor | None = getattr(bucket.state, what)
    return {} if flat is None else bucket.layout.views(flat)


def _all_views(reducer: Reducer, what: str) -> dict[str, Tensor]:
    """Each layer's part of what lasts: of the residual only where what is not sent waits."""
    lasting = [bucket for bucket in reducer.buckets if bucket.source.keeps or what == "velocity"]
    return {name: view for bucket in lasting for name, view in _views(bucket, what).items()}


def _by_layer(reducer: Reducer, what: str) -> dict[str, Tensor]:
    return {name: view.clone() for name, view in _all_views(reducer, what).items()}


def _matched(reducer: Reducer, what: str, saved: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """What there is, and what was saved of it; refuses what does not fit."""
    views = _all_views(reducer, what)
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
    return [(view, saved[name]) for name, view in views.items()]
