"""What is set aside of a frozen layer: nothing is lost over it by any spec, and nobody takes it for a gradient."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from laws import check_conservation
from specs import ALL
from torch import Tensor, nn

import gradcomp
from gradcomp.engine.optimizer_view import OptimizerView

SHAPES = {"a": (400,), "b": (30, 20)}


class Run:
    """A simulation whose layer b can be frozen on all ranks."""

    def __init__(self, spec: str, world: int, optimizer: Callable[..., Any] = torch.optim.SGD, shapes: Any = SHAPES):
        self.world, self.shapes = world, shapes
        self.weights = {name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
        self.optimizer = optimizer(self.weights.values(), lr=0.01)
        named = self.weights.items()
        self.simulation = gradcomp.Simulation(spec, shapes, world, optimizer=self.optimizer, named_parameters=named)
        self._draws = torch.Generator().manual_seed(0)

    def freeze(self, frozen: bool = True) -> None:
        self.weights["b"].requires_grad_(not frozen)

    def grads(self) -> list[dict[str, Tensor]]:
        trained = {name: float(each.requires_grad) for name, each in self.weights.items()}
        return [
            {name: torch.randn(self.shapes[name], generator=self._draws) * factor for name, factor in trained.items()}
            for _ in range(self.world)
        ]

    def step(self) -> dict[str, Tensor]:
        update = self.simulation.step(self.grads())
        for name, weight in self.weights.items():
            weight.grad = update[name].clone()
        self.optimizer.step()
        return update

    def waits(self) -> Tensor:
        return torch.stack([self.simulation.residual(rank)["b"] for rank in range(self.world)]).double().mean(0)


@pytest.mark.parametrize("spec", ALL)
def test_conservation_while_a_layer_is_frozen_and_thereafter(spec: str) -> None:
    run = Run(spec, 3)
    for step in range(9):
        if step in (3, 7):
            run.freeze(step == 3)
        check_conservation(run.simulation, run.grads())


@pytest.mark.parametrize("spec", ["sign", "bingrad:sigmas=1.5,feedback=true", "topk:ratio=0.05", "orq:levels=9,feedback=true"])
def test_rounding_moves_a_frozen_layer_by_no_more_than_one_step_does(spec: str) -> None:
    """sign sends a 0 as a number. Without feedback over it, a hundred steps would add up."""
    run = Run(spec, 2)
    largest = max(float(run.step()["b"].abs().max()) for _ in range(5))
    run.freeze()
    before = run.waits()
    moved = sum((run.step()["b"].double() for _ in range(100)), torch.zeros(SHAPES["b"], dtype=torch.float64))
    assert float(moved.abs().max()) <= largest
    torch.testing.assert_close(run.waits() + moved, before, rtol=1e-5, atol=1e-6)


class Freezing(OptimizerView):
    """The view of a rank that freezes some layers."""

    layers = frozenset[str]()

    def _frozen_layers(self, rank: int) -> frozenset[str]:
        return self.layers


@pytest.mark.parametrize("spec", ["topk:ratio=0.05", "topk:ratio=0.05,by_host=true"])
def test_nothing_is_lost_if_one_rank_of_a_host_freezes_a_layer(spec: str) -> None:
    """Beside what this rank set aside, its residual holds what is left of its neighbours' gradients."""
    for freezing in (0, 1):
        simulation = gradcomp.Simulation(spec, SHAPES, 4, ranks_per_host=2)
        view = simulation._reducers[freezing].view = Freezing(simulation._view.slots)
        draws = torch.Generator().manual_seed(0)
        for step in range(12):
            frozen = 4 <= step < 9
            view.layers = frozenset("b" if frozen else "")
            grads = [{name: torch.randn(shape, generator=draws) for name, shape in SHAPES.items()} for _ in range(4)]
            if frozen:
                grads[freezing]["b"].zero_()
            check_conservation(simulation, grads)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
@pytest.mark.parametrize("steps", [7, 8])  # before one in which the ranks compare noise, and before another
def test_a_step_that_fails_loses_nothing_of_it(kind: Callable[..., Any], steps: int) -> None:
    run = Run("topk:ratio=0.05", 2, kind)
    for _ in range(steps):
        run.step()
    run.freeze()
    before = run.waits()
    simulation = run.simulation
    for reducer in simulation._reducers:
        reducer.ready(simulation._slots["a"], torch.randn(400))
        reducer.start_all()
    for reducer in simulation._reducers:
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
            run.step()
            assert all(-0.1 < each["taken"] < 1.1 for each in run.simulation.stats()["health"])


def test_a_checkpoint_and_a_change_hold_it() -> None:
    run, other = Run("topk:ratio=0.05", 2), Run("topk:ratio=0.05", 2)
    for step in range(6):
        if step == 3:
            run.freeze()
        run.step()
    before = run.waits()
    other.simulation.load_state_dict(run.simulation.state_dict())
    run.simulation.change("sdagc:density=0.05")
    assert before.any() and torch.equal(run.waits(), before) and torch.equal(other.waits(), before)
    run.step()
    run.freeze(False)
    assert run.step()["b"].any()


def test_what_was_set_aside_has_waited_when_it_comes_back() -> None:
    """Masking takes the velocity of entries that waited, when they are sent."""
    run = Run("topk:ratio=0.02,momentum=0.9", 1)
    for step in range(6):
        if step == 3:
            run.freeze()
        run.step()
    run.freeze(False)
    run.step()
    (bucket,) = run.simulation._reducers[0].buckets
    sent = bucket.layout.views(bucket.states["feedback"].last_sent == bucket.steps % 256)["b"]
    assert sent.any() and not bucket.layout.views(bucket.states["sgd"].velocity)["b"][sent].any()
