"""Steps that a GradScaler skips, and layers that are frozen: with everything sent, training goes on as torch's own does."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import gradcomp

SPEC = "topk:ratio=1,wire=exact"
SHAPES = {"a": (8, 8), "b": (8,)}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "nesterov": (SGD, {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    "adam": (Adam, {}),
    "adamw": (AdamW, {"weight_decay": 0.1}),
}


class Training:
    """A model that torch trains, and one that a simulation of two ranks trains beside it."""

    def __init__(self, case: str, spec: str = SPEC):
        kind, settings = CASES[case]
        torch.manual_seed(0)
        self.theirs = {name: nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()}
        self.ours = copy.deepcopy(self.theirs)
        self.optimizers: list[Optimizer] = [kind(each.values(), lr=0.1, **settings) for each in (self.ours, self.theirs)]
        options: dict[str, Any] = {"optimizer": self.optimizers[0], "named_parameters": self.ours.items()}
        self.simulation = gradcomp.Simulation(spec, SHAPES, 2, bucket_mb=1e-4, **options)
        self.steps = 0

    def step(self, bad: Tensor | None = None, of: str = "ab") -> None:
        """Step with drawn gradients. bad: added to those of some layers, whose step is skipped."""
        torch.manual_seed(self.steps)
        self.steps += 1
        grads = {name: torch.randn(shape) for name, shape in SHAPES.items()}
        given = {name: grad + bad if bad is not None and name in of else grad for name, grad in grads.items()}
        updates = self.simulation.step([given] * 2)
        skipped = not all(bool(each.isfinite().all()) for each in updates.values())
        assert skipped == (bad is not None)
        for name in SHAPES:
            self.ours[name].grad = updates[name].clone() if self.ours[name].requires_grad else None
            self.theirs[name].grad = grads[name] if self.theirs[name].requires_grad else None
        for optimizer in [] if skipped else self.optimizers:
            optimizer.step()

    def check(self, names: str = "ab") -> None:
        for name in names:
            torch.testing.assert_close(self.ours[name], self.theirs[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("skipped", [1, 5, 12])
@pytest.mark.parametrize("begin", [0, 3])
@pytest.mark.parametrize("case", CASES)
def test_steps_that_a_scaler_skips_leave_no_trace(case: str, begin: int, skipped: int) -> None:
    training = Training(case)
    for good in (begin, 4):
        for _ in range(good):
            training.step()
            training.check()
        for _ in range(skipped if good == begin else 0):
            training.step(torch.tensor(math.inf))


@pytest.mark.parametrize("case", ["adam", "adamw"])
def test_a_checkpoint_after_a_skipped_step_counts_the_others(case: str) -> None:
    training = Training(case)
    training.step()
    training.step(torch.tensor(math.nan))
    state = training.simulation.state_dict()
    assert {steps for share in state["of_rank"].values() for steps in share["layers"]["adam"]["steps"].values()} == {1}
    training.simulation.load_state_dict(state)
    training.step()
    training.check()


@pytest.mark.parametrize("case", ["adam", "adamw"])
def test_a_checkpoint_keeps_the_steps_of_each_bucket(case: str) -> None:
    """A bucket whose gradients were finite has seen the skipped step; the other one has not."""
    whole, resumed = Training(case), Training(case)
    for training in (whole, resumed):
        training.step()
        training.step(torch.tensor(math.inf), of="a")
        training.step()
        if training is resumed:
            training.simulation.load_state_dict(training.simulation.state_dict())
        training.step()
    for name in SHAPES:
        assert torch.equal(whole.ours[name], resumed.ours[name])


@pytest.mark.parametrize("spec", ["topk:ratio=1,wire=exact,feedback=false", "orq:levels=9"])
def test_without_error_feedback_a_skipped_gradient_stays_in_the_momentum(spec: str) -> None:
    w = nn.Parameter(torch.zeros(64))
    optimizer = SGD([w], lr=1.0, momentum=0.5)
    simulation = gradcomp.Simulation(spec, {"w": (64,)}, 1, optimizer=optimizer, named_parameters=[("w", w)])
    grad = torch.ones(64)
    grad[3] = math.inf
    assert not simulation.step([{"w": grad}])["w"].isfinite().all()
    update = simulation.step([{"w": torch.zeros(64)}])["w"]
    torch.testing.assert_close(update, torch.where(grad == 1, 0.5, 0.0))


@pytest.mark.parametrize("case", CASES)
def test_a_frozen_layer_does_not_decay(case: str) -> None:
    training = Training(case)
    for each in (training.ours, training.theirs):
        each["b"].requires_grad_(False)
    zeros = {"a": torch.zeros(SHAPES["a"]), "b": torch.zeros(SHAPES["b"])}
    for step in range(20):
        torch.manual_seed(step)
        grads = {**zeros, "a": torch.randn(SHAPES["a"])}
        updates = training.simulation.step([grads] * 2)
        training.ours["a"].grad, training.theirs["a"].grad = updates["a"].clone(), grads["a"]
        assert not updates["b"].any()
        for optimizer in training.optimizers:
            optimizer.step()
    for each in (training.ours, training.theirs):
        each["b"].requires_grad_(True)
    training.step()
    if case in ("sgd", "nesterov"):  # Adam counts the steps of a bucket
        training.check()


def test_without_error_feedback_nothing_is_masked() -> None:
    """No residual doubles the momentum: an entry that is sent now and then keeps its velocity."""
    training = Training("sgd", "topk:ratio=0.25,feedback=false")
    for _ in range(10):
        training.step()
    share, *_ = training.simulation.state_dict()["of_rank"].values()
    assert share["buckets"][0]["stages"]["feedback"]["last_sent"] is None
