"""The optimizer's moments, handed back where a new spec leaves them to it: their means over the ranks, on all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradcomp.core.compressor import Layout
from gradcomp.core.requests import Reduce
from gradcomp.engine.buckets import frozen_layers
from gradcomp.engine.buckets.bucket import Bucket
from gradcomp.engine.optimizers.own_momentum import OwnMomentum
from gradcomp.engine.states.kept_arrays import adam_steps, views
from gradcomp.engine.steps.reducer import Reducer
from gradcomp.networks import Answer


class Means(NamedTuple):
    """Means over the ranks. arrays: by array of a bucket's state, then by layer, flat. steps: those of Adam.

    any_left: moments were in the exchange, on some rank at least; a rank that has just joined has none.
    """

    arrays: dict[str, dict[str, Tensor]]
    steps: int
    any_left: bool


def arrays_of(momentum: OwnMomentum, old: Reducer, new: Reducer) -> Sequence[str]:
    """List the arrays that the optimizer gets back when a new reducer follows an old one. The list is the same on all ranks."""
    left = old.takes_momentum and not new.takes_momentum and old.steps_done > 0
    return momentum.handed_back() if left else ()


def _noise_of(bucket: Bucket, array: str) -> float:
    """Return how much larger an array is than it would be of the mean gradient, which the optimizer sees from now on.

    A rank's second moment holds the noise of its own gradients. Left in there, it would make all steps shorter.
    """
    return bucket.state.noise.lengthening**2 if array == "second" else 1.0


def start(momentum: OwnMomentum, reducer: Reducer, arrays: Sequence[str]) -> Callable[[], Means]:
    """Start to average a reducer's arrays over the ranks. Return a function that waits for the means."""
    network, size = reducer.network, reducer.network.world.size
    answers: list[tuple[str, Layout, Answer]] = []
    for bucket in reducer.buckets:
        frozen_layers.put_back(bucket.state)
        for array in arrays:
            kept: Tensor | None = getattr(bucket.state, array)
            own = torch.zeros_like(bucket.state.residual) if kept is None else kept / (size * _noise_of(bucket, array))
            answers.append(
                (array, bucket.layout, network.start(Reduce(own), f"the mean of {array} moments in bucket {bucket.index}"))
            )
    counts = torch.tensor([adam_steps(reducer) / size, float(momentum.left)], device=reducer.buckets[0].layout.device)
    answer_of_counts = network.start(Reduce(counts), "the number of ranks with moments")

    def wait() -> Means:
        means: dict[str, dict[str, Tensor]] = {array: {} for array in arrays}
        for array, layout, answer in answers:
            mean = answer()
            assert isinstance(mean, Tensor)
            means[array] |= layout.views(mean)
        counts = answer_of_counts()
        assert isinstance(counts, Tensor)
        return Means(means, round(counts[0].item()), bool(counts[1] > 0))

    return wait


def finish(momentum: OwnMomentum, means: Means, new: Iterable[Reducer], shaped: Callable[[str, Tensor], Tensor]) -> None:
    """Give means to the optimizer, and make what waits gradients. Do nothing if the optimizer has had the moments all along.

    new: the reducers that follow. shaped: gives a flat tensor the shape of a parameter, by name.
    """
    if not means.any_left:
        return
    arrays = {
        array: {name: shaped(name, mean).clone() for name, mean in of_layers.items()}
        for array, of_layers in means.arrays.items()
    }
    share = momentum.hand_back(arrays, means.steps)
    for reducer in new:
        for residual in views(reducer, "residual").values():
            residual.mul_(share)
