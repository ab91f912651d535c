"""A layer that is frozen in mid-training: nothing moves it, and its residual stays until the layer is unfrozen."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from laws import check_conservation
from specs import ALL
from torch import Tensor
from torch.optim import SGD, Adam
from training import Named, Training

import gradcomp
from gradcomp.engine.optimizer_view import OptimizerView

SPEC = "topk:ratio=0.05"
LAYERS = {"a": (400,), "b": (30, 20)}


class Run:
    """A training whose layer b can be frozen."""

    def __init__(self, spec: str, world: int, optimizer_of: Callable[..., Any] = SGD, shapes: Any = LAYERS):
        self.training = Training(spec, partial(optimizer_of, lr=0.01), shapes, world, 0)
        self.simulation = self.training.simulation
        self._draws = torch.Generator().manual_seed(0)

    def freeze(self, frozen: bool = True) -> None:
        self.training.weights["b"].requires_grad_(not frozen)

    def grads(self) -> list[Named]:
        return [
            {name: torch.randn(each.shape, generator=self._draws) * each.requires_grad for name, each in weights}
            for weights in [self.training.weights.items()] * self.training.ranks
        ]

    def steps(self, count: int) -> list[Named]:
        """Take steps, and return the updates."""
        return [{name: each.clone() for name, each in self.training.step(self.grads()).items()} for _ in range(count)]

    def waits(self) -> Tensor:
        return torch.stack([self.simulation.residual(rank)["b"] for rank in range(self.training.ranks)]).double().mean(0)


@pytest.mark.parametrize("spec", ALL)
def test_conservation_while_a_layer_is_frozen_and_thereafter(spec: str) -> None:
    run = Run(spec, 3)
    for step in range(9):
        if step in (3, 7):
            run.freeze(step == 3)
        check_conservation(run.simulation, run.grads())


@pytest.mark.parametrize("spec", ["sign", "bingrad:sigmas=1.5,feedback=true", "topk:ratio=0.05", "orq:levels=9,feedback=true"])
def test_nothing_moves_a_frozen_layer_that_shares_groups_with_others(spec: str) -> None:
    """sign sends a 0 as a number."""
    run = Run(spec, 2)
    run.steps(5)
    run.freeze()
    before = run.waits()
    assert not any(update["b"].any() for update in run.steps(10))
    assert torch.equal(run.waits(), before)


class Freezing(OptimizerView):
    """The view of a rank that freezes some layers."""

    layers = frozenset[str]()

    def _frozen_layers(self) -> frozenset[str]:
        return self.layers


@pytest.mark.parametrize("freezing", [0, 1])
@pytest.mark.parametrize("spec", ["topk:ratio=0.05", "topk:ratio=0.05,by_host=true"])
def test_nothing_is_lost_if_one_rank_of_a_host_freezes_a_layer(spec: str, freezing: int) -> None:
    """Its residual holds what it set aside, and the rest of its neighbours' gradients."""
    simulation = gradcomp.Simulation(spec, LAYERS, 4, ranks_per_host=2)
    view = simulation._reducers[freezing].view = Freezing(simulation._view.slots)
    draws = torch.Generator().manual_seed(0)
    for step in range(12):
        frozen = 4 <= step < 9
        view.layers = frozenset("b" if frozen else "")
        grads = [{name: torch.randn(shape, generator=draws) for name, shape in LAYERS.items()} for _ in range(4)]
        if frozen:
            grads[freezing]["b"].zero_()
        check_conservation(simulation, grads)


@pytest.mark.parametrize("kind", [Adam, SGD])
@pytest.mark.parametrize("steps", [7, 8])  # before one in which the ranks compare noise, and before another
def test_a_step_that_fails_loses_nothing_of_it(kind: Callable[..., Any], steps: int) -> None:
    run = Run(SPEC, 2, kind)
    run.steps(steps)
    run.freeze()
    before = run.waits()
    for reducer in run.simulation._reducers:
        reducer.ready(run.simulation._slots["a"], torch.randn(400))
        reducer.start_all()
    for reducer in run.simulation._reducers:
        reducer.abort()
    assert before.any() and torch.equal(run.waits(), before)


@pytest.mark.parametrize("spec", ["topk:ratio=0.01", "sign"])
def test_the_health_of_a_bucket_is_that_of_the_layers_that_train(spec: str) -> None:
    run = Run(spec, 2, shapes={"a": (200,), "b": (5000,)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(250):
            if step == 100:
                run.freeze()
            run.steps(1)
            assert all(-0.1 < each["taken"] < 1.1 for each in run.simulation.stats()["health"])


def test_a_checkpoint_and_a_change_hold_it() -> None:
    run, other = Run(SPEC, 2), Run(SPEC, 2)
    run.steps(3)
    run.freeze()
    run.steps(3)
    before = run.waits()
    other.simulation.load_state_dict(run.simulation.state_dict())
    run.simulation.change("sdagc:density=0.05")
    assert before.any() and torch.equal(run.waits(), before) and torch.equal(other.waits(), before)
    run.steps(1)
    run.freeze(False)
    assert run.steps(1)[0]["b"].any()


def test_the_residual_of_a_layer_that_is_unfrozen_counts_as_waiting() -> None:
    """Masking takes the velocity of entries that waited, when they are sent."""
    run = Run("topk:ratio=0.02,momentum=0.9", 1)
    run.steps(3)
    run.freeze()
    run.steps(3)
    run.freeze(False)
    run.steps(1)
    (bucket,) = run.simulation._reducers[0].buckets
    sent = bucket.layout.views(bucket.states["feedback"].last_sent == bucket.steps % 256)["b"]
    assert sent.any() and not bucket.layout.views(bucket.states["sgd"].velocity)["b"][sent].any()


def test_the_residual_of_a_frozen_layer_keeps_up_with_the_learning_rate() -> None:
    """As much of it comes at last as if the rate had changed after the layer was unfrozen."""
    arrivals: list[Tensor] = []
    for frozen in (False, True):
        run = Run("topk:ratio=0.1", 1, shapes={"a": (100,), "b": (100,)})
        run.steps(1)
        before = run.waits()
        run.training.optimizer.param_groups[0]["lr"] = 0.005
        run.freeze(frozen)
        update = run.simulation.step([{}])["b"].clone()
        assert update.any() != frozen
        arrivals.append(run.waits() + update)
        torch.testing.assert_close(arrivals[-1], 2 * before)  # the rate is halved
    torch.testing.assert_close(*arrivals)


@pytest.mark.parametrize("spec", ["topk:ratio=1", "topk:ratio=0.3", "topk:ratio=0.3,wire=exact"])
@pytest.mark.parametrize("settings", [{}, {"nesterov": True, "weight_decay": 1e-4}], ids=["heavy ball", "nesterov"])
def test_a_layer_that_comes_back_goes_on_as_if_it_had_not_been_frozen(spec: str, settings: dict[str, Any]) -> None:
    """An entry that was sent in the last step before keeps its velocity when it is sent in the first one after."""
    ends = []
    for pause in (0, 3):
        draws, run = torch.Generator().manual_seed(0), Run(spec, 2, partial(SGD, momentum=0.9, **settings), {"b": (30, 20)})
        for step in range(12 + pause):
            run.freeze(6 <= step < 6 + pause)
            trains = run.training.weights["b"].requires_grad
            run.training.step([{"b": torch.randn(30, 20, generator=draws) if trains else torch.zeros(30, 20)} for _ in "ab"])
        ends.append(run.training.weights["b"].detach())
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("settings", [{}, {"nesterov": True, "weight_decay": 1e-4}], ids=["heavy ball", "nesterov"])
@pytest.mark.parametrize("loads", [False, True])
@pytest.mark.parametrize("rate,factor", [(0.005, 2), (0.0, 1)])
def test_the_residual_of_a_frozen_layer_follows_the_rate_beside_a_momentum(
    settings: dict[str, Any], loads: bool, rate: float, factor: float
) -> None:
    """loads: the step takes moments of the optimizer's state over. At the rate 0 the residual stays."""
    run = Run("topk:ratio=0.1", 2, partial(SGD, momentum=0.9, **settings))
    run.steps(3)
    run.freeze()
    before, optimizer = run.waits(), run.training.optimizer
    if loads:
        for weight in run.training.weights.values():
            optimizer.state[weight] = {"momentum_buffer": torch.randn(weight.shape)}
    optimizer.param_groups[0]["lr"] = rate
    run.steps(1)
    assert before.any()
    torch.testing.assert_close(run.waits(), factor * before)
    assert run.simulation._reducers[0].buckets[0].residual_factor == (factor if rate else 0)


@pytest.mark.parametrize("rate", [0.01, 0.0])
def test_reading_the_residual_in_the_middle_of_a_step_changes_nothing(rate: float) -> None:
    kept = []
    for reads in (False, True):
        run = Run(SPEC, 2)
        run.steps(3)
        run.freeze()
        run.training.optimizer.param_groups[0]["lr"] = rate
        before = run.waits()
        for reducer, grads in zip(run.simulation._reducers, run.grads(), strict=True):
            reducer.ready(run.simulation._slots["a"], grads["a"])
        for reducer in run.simulation._reducers:
            reducer.start_all()
        assert not reads or torch.equal(run.waits(), before)
        while [reducer for reducer in run.simulation._reducers if reducer.advance()]:
            pass
        for reducer in run.simulation._reducers:
            reducer.end_step()
        assert before.any() and torch.equal(run.waits(), before)
        kept.append(run.simulation.residual(0)["a"])
    assert torch.equal(*kept)
