"""The optimizer's moments, returned where a new spec leaves them to it: their means over the ranks, on all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradcomp.core.compressor import Layout
from gradcomp.core.requests import Reduce
from gradcomp.engine.optimizer_view import OptimizerView
from gradcomp.engine.reducer import Reducer
from gradcomp.engine.stages.adam import Adam
from gradcomp.engine.state import residual_views
from gradcomp.networks import Answer


class Means(NamedTuple):
    """Means over the ranks. arrays: by name, then by layer, flat. steps: those of Adam.

    any_left: moments were in the exchange, on some rank at least; a rank that has just joined has none.
    """

    arrays: dict[str, dict[str, Tensor]]
    steps: int
    any_left: bool


def moments_to_return(view: OptimizerView, old: Reducer, new: Reducer) -> Sequence[str]:
    """List the moments that the optimizer gets back when a new reducer follows an old one. All ranks get the same list."""
    left = old.takes_momentum and not new.takes_momentum and old.steps_done > 0
    return view.arrays_to_hand_back() if left else ()


def average_moments(view: OptimizerView, reducer: Reducer, names: Sequence[str]) -> Callable[[], Means]:
    """Start to average moments over the ranks. Return a function that waits for the means."""
    network, size = reducer.network, reducer.network.world.size
    answers: list[tuple[str, Layout, Answer]] = []
    steps = 0
    for bucket in reducer.buckets:
        kept = bucket.moments()
        for name in names:
            own = kept[name] / size if name in kept else torch.zeros_like(bucket.residual)
            answers.append(
                (name, bucket.layout, network.start(Reduce(own), f"the mean of {name} moments in bucket {bucket.index}"))
            )
        if Adam.name in bucket.states:
            steps = max(steps, bucket.states[Adam.name].steps_seen())
    counts = torch.tensor([steps / size, float(view.left)], device=reducer.buckets[0].layout.device)
    answer_of_counts = network.start(Reduce(counts), "the number of ranks with moments")

    def wait() -> Means:
        means: dict[str, dict[str, Tensor]] = {name: {} for name in names}
        for name, layout, answer in answers:
            mean = answer()
            assert isinstance(mean, Tensor)
            means[name] |= layout.views(mean)
        counts = answer_of_counts()
        assert isinstance(counts, Tensor)
        return Means(means, round(counts[0].item()), bool(counts[1] > 0))

    return wait


def return_moments(view: OptimizerView, means: Means, new: Reducer) -> None:
    """Install averaged moments in the optimizer, and rescale residuals to gradients. Do nothing if it has its own."""
    if not means.any_left:
        return
    share = view.hand_back(means.arrays, means.steps, new.network.world.size)
    for residual in residual_views(new).values():
        residual.mul_(share)
