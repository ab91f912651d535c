"""A clip that acts for the first time after the steps in which gradcomp looks for one, on updates of few entries."""

from __future__ import annotations

import itertools
import math
import warnings
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradcomp
from gradcomp.engine.user_clip import TRIAL

pytestmark = pytest.mark.slow

RATE, MOMENTUM, BOUND = 0.1, 0.9, 10.0
ENTRIES = 3000, 1000, 200
EARLY, LATE = TRIAL // 2, TRIAL + 4
# Ratio, form of SGD, and the step and the length of the spike.
SPIKES = [
    (0.01, "sgd", EARLY, 1e4),
    (0.001, "nesterov", EARLY, 1e4),
    (0.01, "sgd", LATE, 100.0),
    (0.001, "nesterov", LATE, 100.0),
]
SPIKES += [*itertools.product((0.01, 0.001), ("sgd", "nesterov", "plain"), (LATE,), (1e4,))]


class Layers(nn.Module):
    """Layers that compute nothing: the gradient of the loss is what is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList([torch.zeros(size) for size in ENTRIES])

    def forward(self, given: Tensor) -> Tensor:
        return torch.stack([(own * each).sum() for own, each in zip(self.layers, given.split(ENTRIES), strict=True)]).sum()


class Run:
    """A training with SGD under a clip."""

    def __init__(self, ratio: object, bound: float, form: str = "sgd"):
        self.model, self.bound, momentum = Layers(), bound, 0.0 if form == "plain" else MOMENTUM
        self.whole = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), RATE, momentum=momentum, nesterov=form == "nesterov")
        self.handle = gradcomp.ddp.attach(self.whole, f"topk:ratio={ratio}", optimizer=self.optimizer)

    def step(self, gradient: Tensor) -> float:
        """Take a step. Return the norm that the clip saw."""
        self.optimizer.zero_grad()
        self.whole(gradient).backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.bound)
        self.optimizer.step()
        return float(norm)

    def weights(self) -> Tensor:
        return torch.cat([each.detach().clone() for each in self.model.parameters()])


def drawn(step: int, norm: float) -> Tensor:
    """Draw this rank's gradient in a step."""
    noise = torch.randn(sum(ENTRIES), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    return norm * noise / noise.norm()


def spiked(ratio: float, form: str, at: int, length: float) -> float:
    """Train with one huge gradient. Return the distance from it on, once all has been sent."""
    run = Run(ratio, BOUND, form)
    for step in range(at):
        run.step(drawn(step, 0.01))
    before = run.weights()
    run.step(drawn(at, length))
    for step in range(25):
        if step == 5:
            run.handle.change("topk:ratio=1,wire=exact")
        run.step(torch.zeros(sum(ENTRIES)))
    return float((run.weights() - before).norm())


def calm() -> tuple[float, list[float], float]:
    """Train on gradients of one norm. Return the distance, the norms of updates, and the distance to one that nobody clips.

    The updates' norms grow. The bound is above the gradients' and below the last updates'.
    """
    signal = drawn(0, 1.0)
    gradients = [0.7 * signal + drawn(step, 0.7) for step in range(1, 24)]
    free = Run(0.001, 1e9)
    norms = [free.step(each) for each in gradients]
    run = Run(0.001, 1.02 * max(norms[:LATE]))
    for each in gradients:
        run.step(each)
    for each in (run, free):
        each.handle.change("topk:ratio=1,wire=exact")
        for _ in range(20):
            each.step(torch.zeros(sum(ENTRIES)))
    return float(free.weights().norm()), norms, float((run.weights() - free.weights()).norm())


def again(length: float) -> Tensor:
    """Clip one gradient early, none for many steps, and all later. Return the way from before these on."""
    run = Run("1,wire=exact", BOUND)
    before = run.weights()
    for step in range(45):
        clips = step < 4 or step >= 35
        run.bound = BOUND if clips else 1e9
        if step == 35:
            before = run.weights()
        run.step(drawn(step, length if step == 2 else 1.37 * BOUND if step >= 35 else 0.8 * BOUND))
    return run.weights() - before


def program() -> dict[Any, Any]:
    ranks.join()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "gradcomp: the gradients were clipped")
        return {case: spiked(*case) for case in SPIKES} | {"calm": calm(), "again": [again(20.0), again(1e4)]}


found = ranks.once(lambda: ranks.launch(program, 2))


@pytest.mark.parametrize("case", SPIKES, ids=str)
def test_a_spike_moves_weights_about_as_far_as_a_clipped_dense_step(case: tuple[float, str, int, float]) -> None:
    """Without momentum, the update of a top-k has at least the square root of its ratio of the gradient's length."""
    ratio, form, *_ = case
    most = RATE * BOUND / math.sqrt(ratio) if form == "plain" else 1.2 * RATE * BOUND / (1 - MOMENTUM)
    for own in found():
        assert 0 < own[case] < most


def test_gradients_that_are_shorter_than_the_bound_lose_nothing_to_a_clip_of_long_updates() -> None:
    for own in found():
        distance, norms, off = own["calm"]
        bound = 1.02 * max(norms[:LATE])
        assert 1 < bound < max(norms) and off < 0.05 * distance, (distance, norms, off)


def test_a_clip_that_is_back_does_not_cut_by_a_gradient_that_was_cut_before() -> None:
    for own in found():
        short, long = own["again"]
        assert short.norm() > 0 and (long - short).norm() < 0.1 * short.norm()
