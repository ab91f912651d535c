"""A rank's share of a checkpoint: residuals and velocities by layer, and each compressor's own state by bucket."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradcomp import saved
from gradcomp.engine.states.kept_arrays import (
    ARRAYS,
    OF_OPTIMIZER,
    adam_steps,
    copies,
    make_moments,
    rates,
    set_rates,
    views,
)
from gradcomp.engine.states.shares import new_state, of_adam_alone, read_shares
from gradcomp.engine.steps.reducer import Reducer
from gradcomp.native.extension import LARGEST


def residual(reducer: Reducer) -> dict[str, Tensor]:
    """Copy the residual of every layer, flat. It is zero where there is no error feedback."""
    zeros = {name: torch.zeros(layer.size, device=layer.device) for name, layer in reducer.layers.items()}
    return zeros | copies(reducer, "residual")


def save(
    reducer: Reducer, shapes: Mapping[str, str], *, sums: bool = False, copy: Callable[[Tensor], Tensor] = Tensor.clone
) -> dict[str, Any]:
    """Copy all that the next step depends on.

    shapes: the shape and the order of memory of every layer. sums: the updates are sums over the ranks, not means. copy: copies
    a layer's residual or moment.
    """
    return {
        "steps": reducer.steps_done,
        "adam_steps": adam_steps(reducer),
        "sums": sums,
        "shapes": dict(shapes),
        "rates": rates(reducer),
        **{array: copies(reducer, array, copy) for array in ARRAYS},
        "buckets": [
            {"layers": list(bucket.layout.names), "own": bucket.collector.save(bucket.state)} for bucket in reducer.buckets
        ],
    }


def prepare(
    reducer: Reducer,
    shapes: Mapping[str, str],
    shares: Mapping[int, Mapping[str, Any]],
    steps: int,
    factor: float = 1.0,
    *,
    adam: Mapping[int, Mapping[str, Any]] | None = None,
    trusted: bool = False,
) -> Callable[[], None]:
    """Check shares of the same layers and spec, by rank. Return a function that copies them, after which nothing can fail.

    The residual and the velocity become the sum of the shares' times the factor, Adam's moments their mean. A compressor's own
    state comes from one share (read_shares), and only if a bucket has the same layers; other buckets keep what they have.
    Without shares all is zero, but for Adam's moments, which become the mean of those in `adam`.
    trusted: the shares come from this process, and need not be finite.
    """
    read = read_shares(reducer, shapes, shares or adam or {}, trusted)
    taken = [arrays if shares else of_adam_alone(arrays) for arrays in read.arrays]
    sources = {array: [arrays[array] for arrays in taken] for array in ARRAYS}
    if shares:
        trials, theirs = read.own, saved.table(shares[next(iter(shares))], "rates")
        of_layers = {name: saved.number(theirs, name) for name in shapes if name in theirs}
    else:
        trials, of_layers = [(bucket, new_state(bucket)) for bucket in reducer.buckets], rates(reducer)

    def copy() -> None:
        for array in OF_OPTIMIZER:
            make_moments(reducer, array, {name for source in sources[array] for name in source})
        of_adam = {name for source in sources["second"] for name in source}
        for array in ARRAYS:
            for name, view in views(reducer, array).items():
                view.zero_()
                found = [source[name] for source in sources[array] if name in source]
                of_one = 1 / max(1, len(found)) if array in OF_OPTIMIZER and name in of_adam else factor
                for each in found:
                    view.add_(each.to(view.device), alpha=of_one).clamp_(-LARGEST, LARGEST)
        reducer.steps_done = steps
        set_rates(reducer, of_layers)
        for bucket in reducer.buckets:
            bucket.state.steps, bucket.state.adam_steps = steps, read.adam_steps
            bucket.state.flag.zero_()
        for bucket, trial in trials:
            bucket.state.inner, bucket.state.sent_in = trial.inner, trial.sent_in
            bucket.state.noise = trial.noise
            if shares:
                bucket.state.adam_steps = trial.adam_steps
            bucket.state.steps = trial.steps if shares else steps  # change() begins a warm-up anew

    return copy


def to_main_memory(tensor: Tensor) -> Tensor:
    """Copy a tensor to main memory, also one that is there."""
    return tensor.to("cpu", copy=True)


def in_main_memory(value: Any) -> Any:
    """Move all tensors of a share to main memory."""
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: in_main_memory(each) for key, each in value.items()}
    return [in_main_memory(each) for each in value] if isinstance(value, list) else value


def saved_steps(shares: Mapping[int, Mapping[str, Any]]) -> int:
    """Return the number of steps of the shares of all ranks. Refuse shares of different steps."""
    steps = {rank: saved.read_int(share, "steps") for rank, share in shares.items()}
    first, *others = steps.items()
    for rank, count in others:
        if count != first[1]:
            raise ValueError(
                f"the states are of different steps: that of rank {first[0]} has {first[1]}, that of rank {rank} has {count}; "
                "load states that all ranks saved after the same step"
            )
    return first[1]


def shape_texts(shapes: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Describe shapes of layers whose entries are in row-major order."""
    return {name: str(tuple(shape)) for name, shape in shapes.items()}
