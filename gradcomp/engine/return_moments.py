"""The optimizer's moments, returned where a new spec leaves them to it: their means over the ranks, on all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gradcomp.core.compressor import Layout
from gradcomp.core.requests import Reduce
from gradcomp.engine.optimizer_view import OptimizerView
from gradcomp.engine.reducer import Reducer
from gradcomp.engine.stages.adam import Adam
from gradcomp.engine.state import residual_views
from gradcomp.networks import Answer


def moments_to_return(view: OptimizerView, old: Reducer, new: Reducer) -> Sequence[str]:
    """List the moments that the optimizer gets back when a new reducer follows an old one. All ranks get the same list."""
    left = old.takes_momentum and not new.takes_momentum and old.steps_done > 0
    return view.arrays_to_hand_back() if left else ()


def return_moments(view: OptimizerView, old: Reducer, new: Reducer, names: Sequence[str]) -> Iterator[None]:
    """Average the moments of these names in lock-step with other ranks, give them to the optimizer, and rescale residuals.

    A rank that has just joined has none. If all have, the optimizer keeps its own.
    """
    network, size = old.network, old.network.world.size
    answers: list[tuple[str, Layout, Answer]] = []
    steps, has_moments = 0, False
    for bucket in old.buckets:
        kept = bucket.moments()
        has_moments |= bool(kept)
        for name in names:
            own = kept[name] / size if name in kept else torch.zeros_like(bucket.residual)
            answer = network.start(Reduce(own), f"the mean of {name} moments in bucket {bucket.index}")
            answers.append((name, bucket.layout, answer))
        if Adam.name in bucket.states:
            steps = max(steps, bucket.states[Adam.name].steps_seen())
    counts = torch.tensor([steps / size, float(has_moments)], device=old.buckets[0].layout.device)
    answer_of_counts = network.start(Reduce(counts), "the number of ranks with moments")
    yield
    means: dict[str, dict[str, Tensor]] = {name: {} for name in names}
    for name, layout, answer in answers:
        means[name] |= layout.views(_sum(answer))
    counts = _sum(answer_of_counts)
    if counts[1] > 0:
        share = view.hand_back(means, round(counts[0].item()), size)
        for residual in residual_views(new).values():
            residual.mul_(share)


def _sum(answer: Answer) -> Tensor:
    total = answer()
    assert isinstance(total, Tensor)
    return total
