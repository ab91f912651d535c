"""Steps that a GradScaler skips, and layers that are frozen: with everything sent, training goes on as torch's own does."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch.optim import SGD, Adam, AdamW
from training import OptimizerOf, Training, draw, mean

SPEC = "topk:ratio=1,wire=exact"
SHAPES = {"a": (8, 8), "b": (8,)}
OPTIMIZERS: dict[str, OptimizerOf] = {
    "sgd": partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "nesterov": partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "adam": partial(Adam, lr=0.1),
    "adamw": partial(AdamW, lr=0.1, weight_decay=0.1),
    "decay in the gradient": partial(Adam, lr=0.1, weight_decay=0.1),
}
of_adam = pytest.mark.parametrize("case", ["adam", "adamw", "decay in the gradient"])


class Pair:
    """A training with gradcomp on two ranks, with a bucket for each layer, beside torch's own."""

    def __init__(self, case: str, spec: str = SPEC):
        self.ours, self.theirs = (Training(each, OPTIMIZERS[case], SHAPES, 2, 1, bucket_mb=1e-4) for each in (spec, None))
        self.steps = 0

    def step(self) -> None:
        for training in (self.ours, self.theirs):
            training.train(1, self.steps)
        self.steps += 1

    def skip(self, bad: float = math.inf, of: str = "ab") -> None:
        """Exchange bad gradients of some layers. The step is skipped."""
        grads = draw(self.steps, SHAPES, 2, alike=True)
        updates = self.ours.simulation.step(
            [{name: grad + bad if name in of else grad for name, grad in own.items()} for own in grads]
        )
        assert not all(bool(each.isfinite().all()) for each in updates.values())
        self.steps += 1

    def check(self) -> None:
        self.ours.ends_as(self.theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("skipped", [1, 5, 12])
@pytest.mark.parametrize("begin", [0, 3])
@pytest.mark.parametrize("case", OPTIMIZERS)
def test_steps_that_a_scaler_skips_leave_no_trace(case: str, begin: int, skipped: int) -> None:
    pair = Pair(case)
    for step in range(begin + 4):
        for _ in range(skipped if step == begin else 0):
            pair.skip()
        pair.step()
        pair.check()


@of_adam
def test_a_checkpoint_after_a_skipped_step_counts_the_others(case: str) -> None:
    pair = Pair(case)
    pair.step()
    pair.skip(math.nan)
    assert {steps for layers in pair.ours.layers("adam") for steps in layers["steps"].values()} == {1}
    pair.ours.simulation.load_state_dict(pair.ours.simulation.state_dict())
    pair.step()
    pair.check()


@of_adam
def test_a_checkpoint_keeps_the_steps_of_each_bucket(case: str) -> None:
    """A bucket whose gradients were finite has seen the skipped step; the other one has not."""
    whole, resumed = Pair(case), Pair(case)
    for pair in (whole, resumed):
        pair.step()
        pair.skip(of="a")
        pair.step()
        if pair is resumed:
            pair.ours.simulation.load_state_dict(pair.ours.simulation.state_dict())
        pair.step()
    whole.ours.ends_as(resumed.ours, 0, 0)


@pytest.mark.parametrize("spec", ["topk:ratio=1,wire=exact,feedback=false", "orq:levels=9"])
def test_without_error_feedback_a_skipped_gradient_stays_in_the_momentum(spec: str) -> None:
    simulation = Training(spec, partial(SGD, lr=1.0, momentum=0.5), {"w": (64,)}).simulation
    grad = torch.ones(64)
    grad[3] = math.inf
    assert not simulation.step([{"w": grad}])["w"].isfinite().all()
    update = simulation.step([{"w": torch.zeros(64)}])["w"]
    torch.testing.assert_close(update, torch.where(grad == 1, 0.5, 0.0))


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_a_frozen_layer_does_not_decay(case: str) -> None:
    pair = Pair(case)

    def freeze(frozen: bool) -> None:
        for training in (pair.ours, pair.theirs):
            training.weights["b"].requires_grad_(not frozen)

    freeze(True)
    for step in range(20):
        grad = draw(step, SHAPES)[0]["a"]
        updates = pair.ours.simulation.step([{"a": grad}] * 2)
        assert not updates["b"].any()
        for training, given in ((pair.ours, updates["a"].clone()), (pair.theirs, grad)):
            training.weights["a"].grad = given
            training.optimizer.step()
    freeze(False)
    pair.step()
    if case in ("sgd", "nesterov"):  # Adam counts the steps of a bucket
        pair.check()


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_weight_decay_of_a_step_that_a_fused_optimizer_skips_acts_once(nesterov: bool) -> None:
    """torch calls step() of a fused optimizer also where a GradScaler skips it: the kernel reads that on the device."""
    of_sgd = partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=nesterov, fused=True)
    ours, theirs = (Training(spec, of_sgd, SHAPES, 2, 1) for spec in (SPEC, None))
    for training in (ours, theirs):
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        scaler.scale(torch.ones(1))
        for step, bad in enumerate([0, 0, math.inf, 0, math.inf, math.nan, 0, 0]):
            grads = [{name: grad + bad for name, grad in own.items()} for own in draw(step, SHAPES, 2)]
            updates = mean(grads) if training is theirs else training.simulation.step(grads)
            for name, weight in training.weights.items():
                weight.grad = updates[name].clone()
            scaler.step(training.optimizer)
            scaler.update(1.0)
    assert not ours.optimizer.state
    ours.ends_as(theirs)
