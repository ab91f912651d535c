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
