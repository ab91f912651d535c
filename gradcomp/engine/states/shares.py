"""Shares of a state, checked against a reducer before anything of them is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradcomp import saved
from gradcomp.engine.buckets.bucket import Bucket
from gradcomp.engine.buckets.collector import BucketState
from gradcomp.engine.buckets.rank_noise import RankNoise
from gradcomp.engine.states.kept_arrays import ARRAYS, OF_OPTIMIZER, later_moments, views
from gradcomp.engine.steps.reducer import Reducer

# The arrays of a share: by array, then by layer.
Arrays = Mapping[str, Mapping[str, Tensor]]


class Read(NamedTuple):
    """What was read of shares. own: new states of the buckets. adam_steps: the steps that Adam's moments have seen."""

    arrays: list[Arrays]
    own: list[tuple[Bucket, BucketState]]
    adam_steps: int


def read_shares(reducer: Reducer, shapes: Mapping[str, str], shares: Mapping[int, Mapping[str, Any]], trusted: bool) -> Read:
    """Check shares, by rank. The buckets' states are those of the first share whose moments of Adam have seen the most steps.

    Moments that have seen fewer are left out: a rank that had just joined would count as one that has all its moments.
    trusted: the shares come from this process, and need not be finite.
    """
    found: list[Arrays] = []
    own: list[tuple[Bucket, BucketState]] | None = None
    steps = {rank: saved.read_int(share, "adam_steps") for rank, share in shares.items()}
    most = max(steps.values(), default=0)
    for rank, share in shares.items():
        try:
            _check_shapes(shapes, share)
            arrays = {array: _check_arrays(reducer, array, saved.table_or_empty(share, array), trusted) for array in ARRAYS}
            _check_moments(arrays)
            loaded = _load_own(reducer, share)
        except ValueError as error:
            raise ValueError(f"{f'rank {rank}: ' if len(shares) > 1 else ''}{error}") from error
        if steps[rank] < most:
            kept = {name: each for name, each in arrays["velocity"].items() if name not in arrays["second"]}
            arrays |= {"velocity": kept, "second": {}}
        elif own is None:
            own = loaded  # of the others, nothing is kept: a state may be as large as the bucket
        found.append(arrays)
    return Read(found, own or [], most)


def of_adam_alone(arrays: Arrays) -> Arrays:
    """Leave out what waits, and SGD's velocities."""
    names = arrays["second"]
    return {array: {name: arrays[array][name] for name in names} if array in OF_OPTIMIZER else {} for array in ARRAYS}


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


def _check_moments(arrays: Arrays) -> None:
    """Refuse half of Adam's moments."""
    if missing := sorted(arrays["second"].keys() - arrays["velocity"].keys()):
        raise ValueError(
            f"the state has Adam's second moment of {missing[0]!r} without the first: it is damaged; load another one"
        )


def new_state(bucket: Bucket) -> BucketState:
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
        trial = new_state(bucket)
        try:
            bucket.collector.load(trial, theirs)
        except (KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
            raise ValueError(
                f"the state of {bucket.collector} is damaged ({type(error).__name__}: {error}); load another one"
            ) from error
        loaded.append((bucket, trial))
    return loaded
