"""A rank's share of a checkpoint: residuals and velocities by layer, and each compressor's own state by bucket."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gradcomp import saved
from gradcomp.engine.buckets.bucket import Bucket
from gradcomp.engine.buckets.collector import BucketState
from gradcomp.engine.buckets.rank_noise import RankNoise
from gradcomp.engine.states.kept_arrays import (
    ARRAYS,
    OF_OPTIMIZER,
    adam_steps,
    copies,
    later_moments,
    make_moments,
    rates,
    set_rates,
    views,
)
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
    moments: Mapping[int, Mapping[str, Any]] | None = None,
    trusted: bool = False,
) -> Callable[[], None]:
    """Check shares of the same layers and spec, by rank. Return a function that copies them, after which nothing can fail.

    The residual and the velocity become the sum of the shares' times the factor, Adam's moments their mean. A compressor's own
    state comes from the first share, and only if a bucket has the same layers; other buckets keep the state that they have.
    Without shares all is zero, but for Adam's moments: they become the mean of those in `moments`.
    trusted: the shares come from this process, and need not be finite.
    """
    sources: dict[str, list[Mapping[str, Tensor]]] = {array: [] for array in ARRAYS}
    trials = [(bucket, _trial(bucket)) for bucket in reducer.buckets] if not shares else []
    steps_of_adam, of_layers = 0, rates(reducer) if not shares else {}
    read = shares or moments or {}
    for i, (rank, share) in enumerate(read.items()):
        try:
            _check_shapes(shapes, share)
            arrays = {array: _check_arrays(reducer, array, saved.table_or_empty(share, array), trusted) for array in ARRAYS}
            loaded = _load_own(reducer, share)
        except ValueError as error:
            raise ValueError(f"{f'rank {rank}: ' if len(read) > 1 else ''}{error}") from error
        for array in ARRAYS if shares else OF_OPTIMIZER:
            taken = arrays[array] if shares else {name: arrays[array][name] for name in arrays["second"]}
            sources[array].append(taken)
        if i > 0:
            continue
        steps_of_adam = saved.whole(share, "adam_steps")
        if shares:
            trials, theirs = loaded, saved.table(share, "rates")
            of_layers = {name: saved.number(theirs, name) for name in shapes if name in theirs}
        else:
            products = {bucket.index: state.nadam_products for bucket, state in loaded}
            trials = [(bucket, replace(trial, nadam_products=products.get(bucket.index, {}))) for bucket, trial in trials]

    def copy() -> None:
        for array in OF_OPTIMIZER:
            make_moments(reducer, array, {name for source in sources[array] for name in source})
        of_adam = {name for source in sources["second"] for name in source}
        for array in ARRAYS:
            for name, view in views(reducer, array).items():
                view.zero_()
                of_one = 1 / len(sources[array]) if array in OF_OPTIMIZER and name in of_adam else factor
                for source in sources[array]:
                    if name in source:
                        view.add_(source[name].to(view.device), alpha=of_one).clamp_(-LARGEST, LARGEST)
        reducer.steps_done = steps
        set_rates(reducer, of_layers)
        for bucket in reducer.buckets:
            bucket.state.steps, bucket.state.adam_steps = steps, steps_of_adam
            bucket.state.flag.zero_()
        for bucket, trial in trials:
            bucket.state.inner, bucket.state.sent_in = trial.inner, trial.sent_in
            bucket.state.nadam_products, bucket.state.noise = trial.nadam_products, trial.noise
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


def _check_shapes(shapes: Mapping[str, str], share: Mapping[str, Any]) -> None:
    """Refuse a share of a model with other layers."""
    theirs = saved.table(share, "shapes")
    _check_names(shapes, theirs)
    for name, shape in shapes.items():
        if theirs[name] != shape:
            raise ValueError(
                f"the state does not fit the model: {name!r} has shape {shape}, in the state {theirs[name]}; load it into the "
                "model that saved it"
            )


def _check_names(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    if different := sorted(map(str, ours.keys() ^ theirs.keys())):
        raise ValueError(
            f"the state does not fit the model: only one of them has {', '.join(different[:3])}; load it into the model that "
            "saved it, and freeze layers after the exchange is made"
        )


def _check_arrays(reducer: Reducer, array: str, theirs: Mapping[str, Any], trusted: bool) -> Mapping[str, Tensor]:
    """Refuse arrays that do not fit the layers, or that are not finite."""
    later = later_moments(reducer) if array in OF_OPTIMIZER else {}
    shapes = {name: view.shape for name, view in views(reducer, array).items()} | later
    shapes = {name: shape for name, shape in shapes.items() if name in theirs or name not in later}
    _check_names(shapes, theirs)
    for name, shape in shapes.items():
        what = f"the {array} of {name!r}"
        saved.tensor(theirs, name, shape, dtype=torch.float32, finite=not trusted, what=what)
    return theirs


def _trial(bucket: Bucket) -> BucketState:
    """Copy a bucket's state with a new state of the inner compressor."""
    collector, state = bucket.collector, bucket.state
    inner = collector.inner.init(bucket.layout, bucket.seed)
    return replace(state, inner=inner, noise=RankNoise(bucket.layout, bucket.seed))


def _load_own(reducer: Reducer, share: Mapping[str, Any]) -> list[tuple[Bucket, BucketState]]:
    """Load the compressors' own states into new ones, by bucket."""
    own = {
        tuple(saved.sequence(each, "layers")): saved.table_or_empty(each, "own") for each in saved.sequence(share, "buckets")
    }
    loaded = []
    for bucket in reducer.buckets:
        if (theirs := own.get(bucket.layout.names)) is None:
            continue
        trial = _trial(bucket)
        try:
            bucket.collector.load(trial, theirs)
        except (KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
            raise ValueError(
                f"the state of {bucket.collector} is damaged ({type(error).__name__}: {error}); load another one"
            ) from error
        loaded.append((bucket, trial))
    return loaded


def saved_steps(shares: Mapping[int, Mapping[str, Any]]) -> int:
    """Return the number of steps of the shares of all ranks. Refuse shares of different steps."""
    steps = {rank: saved.whole(share, "steps") for rank, share in shares.items()}
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
