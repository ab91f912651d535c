"""Directions as long as Adam's: a rank's second moment holds noise that the mean of all ranks has not."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import gradcomp

N, STEPS = 1000, 64
ALL_SENT = "topk:ratio=1,wire=exact"


class Pair:
    """Weights that torch's Adam moves by the mean of the ranks' gradients, and equal ones that an exchange moves."""

    def __init__(self, ranks: int, spec: str = ALL_SENT, shapes: Any = None, **options: Any):
        self.ranks, self.shapes = ranks, shapes or {"w": (N,)}
        self.ours, self.theirs = ({name: torch.nn.Parameter(torch.zeros(s)) for name, s in self.shapes.items()} for _ in "ab")
        settings = {"lr": 1e-3, "betas": (0.9, 0.95)}
        self.own = torch.optim.AdamW(self.ours.values(), **settings)
        self.torchs = torch.optim.AdamW(self.theirs.values(), **settings)
        named = list(self.ours.items())
        self.simulation = gradcomp.Simulation(spec, self.shapes, ranks, optimizer=self.own, named_parameters=named, **options)

    def step(self, grads: list[dict[str, Tensor]]) -> None:
        update = self.simulation.step(grads)
        for name in self.shapes:
            self.ours[name].grad = update[name]
            self.theirs[name].grad = torch.stack([own[name] for own in grads]).mean(0)
        self.own.step()
        self.torchs.step()

    def distances(self, begun: tuple[dict[str, Tensor], dict[str, Tensor]]) -> dict[str, float]:
        """How far ours went since then, over how far torch's went."""
        return {
            name: float(
                (self.ours[name] - begun[0][name]).detach().norm() / (self.theirs[name] - begun[1][name]).detach().norm()
            )
            for name in self.shapes
        }

    def weights(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return tuple({name: each.detach().clone() for name, each in side.items()} for side in (self.ours, self.theirs))  # type: ignore[return-value]


def noisy(step: int, ranks: int, noise: list[float], shapes: Any, signal: float = 0.3) -> list[dict[str, Tensor]]:
    torch.manual_seed(0)
    signals = {name: signal * torch.randn(shape) for name, shape in shapes.items()}
    torch.manual_seed(1000 + step)
    return [{name: signals[name] + noise[rank] * torch.randn(shape) for name, shape in shapes.items()} for rank in range(ranks)]


def train(pair: Pair, steps: int = STEPS, noise: float = 1.0, begin: int = 16) -> dict[str, float]:
    """The distances, from the second comparison on."""
    begun = pair.weights()
    for step in range(steps):
        if step == begin:
            begun = pair.weights()
        pair.step(noisy(step, pair.ranks, [noise] * pair.ranks, pair.shapes))
    return pair.distances(begun)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_with_everything_sent_steps_are_as_long_as_adams_of_the_mean(ranks: int) -> None:
    """Without the comparison they are 0.76, 0.60 and 0.49 times as long on 2, 4 and 8 ranks."""
    assert train(Pair(ranks))["w"] == pytest.approx(1, abs=1e-4 if ranks == 1 else 0.08)


def test_ranks_with_other_noise_count_as_their_gradients_do() -> None:
    """The noisiest rank's directions are longest, as its gradients are. Torch divides the mean of all by one moment."""
    noise = [3.0, 1.0, 0.5, 0.1]
    pair = Pair(4)
    for step in range(STEPS):
        if step == 16:
            begun = pair.weights()
        pair.step(noisy(step, 4, noise, pair.shapes))
    assert pair.distances(begun)["w"] == pytest.approx(1, abs=0.12)  # a rank's own noise also decides which entries count
    moved = [(side["w"].detach() - before["w"]) for side, before in zip((pair.ours, pair.theirs), begun, strict=True)]
    assert float(torch.nn.functional.cosine_similarity(*moved, dim=0)) > 0.97


def test_layers_of_any_size_and_scale_count() -> None:
    shapes = {"large": (20_000,), "small": (100,)}
    pair = Pair(4, shapes=shapes)
    scales = {"large": 1e-6, "small": 1e3}
    for step in range(STEPS):
        if step == 16:
            begun = pair.weights()
        grads = noisy(step, 4, [1.0] * 4, shapes)
        pair.step([{name: scales[name] * own[name] for name in shapes} for own in grads])
    for distance in pair.distances(begun).values():
        assert distance == pytest.approx(1, abs=0.12)  # a sample of 1024 entries, a few of them of the small layer


def test_rows_that_one_rank_sees_alone_spoil_nothing() -> None:
    """As of an embedding: each rank has gradients in rows of its own."""
    pair = Pair(4, shapes={"w": (400, 10)})
    for step in range(STEPS):
        torch.manual_seed(step)
        grads = [torch.zeros(400, 10) for _ in range(4)]
        for rank, grad in enumerate(grads):
            grad[rank::4] = torch.randn(100, 10)
        pair.step([{"w": grad} for grad in grads])
    (bucket,) = pair.simulation._reducers[0].buckets
    assert bucket.states["adam"].noise.factor == pytest.approx(4, rel=0.01)  # the mean is a quarter of what a rank has
    assert all(weight.isfinite().all() for weight in pair.ours.values())


def test_a_gradient_that_is_not_finite_is_not_compared() -> None:
    pair = Pair(2)
    for step in range(STEPS):
        grads = noisy(step, 2, [1.0, 1.0], pair.shapes)
        if step == 24:  # a step with a comparison, and so is step 32
            before = [reducer.buckets[0].states["adam"].noise.sums.clone() for reducer in pair.simulation._reducers]
            pair.step(grads)
            after = [reducer.buckets[0].states["adam"].noise.sums for reducer in pair.simulation._reducers]
            assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        elif step == 32:
            before = [reducer.buckets[0].states["adam"].noise.sums.clone() for reducer in pair.simulation._reducers]
            grads[1]["w"][5] = math.inf
            pair.simulation.step(grads)
            after = [reducer.buckets[0].states["adam"].noise.sums for reducer in pair.simulation._reducers]
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        else:
            pair.step(grads)


@pytest.mark.parametrize("size", [30, 1000])
def test_a_spike_is_forgotten_as_soon_as_adam_forgets_it(size: float) -> None:
    """In a step that compares, and in the one behind it: after 200 steps all is as before."""
    for at in (160, 161):
        pair = Pair(4, shapes={"w": (200,)})
        for step in range(at + 320):
            if step == at + 200:
                begun = pair.weights()
            grads = noisy(step, 4, [1.0] * 4, pair.shapes)
            if step == at:
                grads[3]["w"] *= size
            pair.step(grads)
        assert pair.distances(begun)["w"] == pytest.approx(1, abs=0.15), at


def test_a_factor_that_no_ranks_can_have_is_not_loaded() -> None:
    pair = Pair(4)
    state = pair.simulation.state_dict()
    state["of_rank"]["1"]["buckets"][0]["stages"]["adam"]["noise"] = [1.0, 1.0, 1e30, 4.0, 0.0]
    pair.simulation.load_state_dict(state)
    assert pair.simulation._reducers[1].buckets[0].states["adam"].noise.factor == 4


@pytest.mark.parametrize("saved_after", [3, 8, 17, 24])
def test_a_training_that_is_resumed_goes_on_alike(saved_after: int) -> None:
    pair = Pair(4, "topk:ratio=0.1")
    for step in range(40):
        if step == saved_after:
            state, weights, groups = pair.simulation.state_dict(), pair.weights(), copy.deepcopy(pair.own.state_dict())
        pair.step(noisy(step, 4, [1.0] * 4, pair.shapes))
    again = Pair(4, "topk:ratio=0.1")
    again.own.load_state_dict(groups)
    again.simulation.load_state_dict(state)
    for name, weight in again.ours.items():
        weight.data.copy_(weights[0][name])
    for step in range(saved_after, 40):
        again.step(noisy(step, 4, [1.0] * 4, pair.shapes))
    for name in pair.shapes:
        assert torch.equal(again.ours[name], pair.ours[name])


def test_a_change_of_the_spec_goes_on_with_the_ratio() -> None:
    pair = Pair(4)
    train(pair, 32)
    before = [reducer.buckets[0].states["adam"].noise.factor for reducer in pair.simulation._reducers]
    pair.simulation.change("topk:ratio=0.5")
    assert [reducer.buckets[0].states["adam"].noise.factor for reducer in pair.simulation._reducers] == before and min(
        before
    ) > 1.2


def test_another_number_of_ranks_begins_anew() -> None:
    """One rank has no noise beside the mean, whatever was measured on eight."""
    pair = Pair(8)
    train(pair, 24)
    state = pair.simulation.state_dict()
    alone = Pair(1)
    alone.simulation.load_state_dict([state])
    (bucket,) = alone.simulation._reducers[0].buckets
    assert bucket.states["adam"].noise.factor > 2
    alone.step(noisy(24, 1, [1.0], alone.shapes))
    assert bucket.states["adam"].noise.factor == 1


def test_entries_without_gradients_for_long_do_not_end_the_comparison() -> None:
    """Their second moments end as denormal numbers, whose shares are 0 with many ranks."""
    pair = Pair(2)
    grads = noisy(0, 2, [1.0, 1.0], pair.shapes)
    for step in range(24):
        pair.step(noisy(step, 2, [1.0, 1.0], pair.shapes))
    for reducer in pair.simulation._reducers:
        state = reducer.buckets[0].states["adam"]
        state.second[:5], state.first[:5] = 1.4e-45, 1e-30
        before = state.noise.sums.clone()
    for own in grads:
        own["w"][:5] = 0
    pair.step(grads)
    assert not torch.equal(before, state.noise.sums) and bool(state.noise.sums.isfinite().all())
