"""A momentum by every door: with everything sent, SGD trains as torch's own, and Adam by the mean of the ranks' steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import doors
import horovod.torch as hvd
import pytest
import ranks
import torch
import torch.distributed as dist
from doors import DDP, DOORS, EVERY, Training
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

pytestmark = pytest.mark.slow

RANKS, STEPS = 2, 18
# Before the ranks compare the noise of their steps for the first time, and act on it.
FEW = 12
SPEC = "topk:ratio=1,wire=exact"
LEFT = f"{SPEC},momentum=0"
SETTINGS: dict[str, dict[str, Any]] = {
    "momentum and weight decay": {"momentum": 0.9, "weight_decay": 0.1},
    "nesterov": {"momentum": 0.8, "weight_decay": 0.1, "nesterov": True},
    "schedule": {"momentum": 0.9, "weight_decay": 0.05},
    "half the weight decay": {"momentum": 0.9, "weight_decay": 0.05},
    "two groups": {"momentum": 0.9},
    "momentum alone": {"momentum": 0.9},
}
ADAM_RATE, DECAY, BETAS = 0.02, 0.1, (0.9, 0.95)


class Two(nn.Module):
    """Two layers that compute nothing: the gradient of the loss is what is given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b = nn.Parameter(torch.randn(30, 20)), nn.Parameter(torch.randn(7))

    def forward(self, given: list[Tensor]) -> Tensor:
        return (self.a * given[0]).sum() + (self.b * given[1]).sum()


def gradients(rank: int, step: int) -> list[Tensor]:
    """Draw a rank's gradients in a step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(30, 20, generator=generator), torch.randn(7, generator=generator)]


def sgd(model: Any, case: str, lr: float = 0.05) -> SGD:
    """Make the optimizer of a case."""
    groups: Any = [{"params": [model.a], "weight_decay": 0.2}, {"params": [model.b], "lr": lr / 2}]
    return SGD(groups if case == "two groups" else model.parameters(), lr=lr, **SETTINGS[case])


def adamw(model: Two, **settings: Any) -> Optimizer:
    return AdamW(model.parameters(), **{"lr": ADAM_RATE, "weight_decay": DECAY, "betas": BETAS, **settings})


def schedule(case: str, optimizer: Optimizer) -> Callable[[], None]:
    """Make the call that follows every step: a schedule of rates under which the velocity has each gradient's own."""
    if case != "schedule":
        return lambda: None
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=2 * STEPS + 1).step


def weights(model: nn.Module) -> list[Tensor]:
    return [each.detach().clone() for each in model.parameters()]


def close(found: list[Tensor], wanted: list[Tensor]) -> None:
    for own, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)


# Training by torch alone. broadcasts: begin with the step without gradients that hvd.broadcast_optimizer_state() makes, and
# that applies the weight decay.


def with_sgd(case: str, steps: int = STEPS, broadcasts: bool = False) -> tuple[list[Tensor], dict[str, Any]]:
    """Train with torch's SGD on the mean gradient. Return the weights and the optimizer's state."""
    model = Two()
    optimizer = sgd(model, case)
    after_step = schedule(case, optimizer)
    if broadcasts:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    for step in range(steps):
        drawn = [gradients(rank, step) for rank in range(RANKS)]
        for parameter, parts in zip(model.parameters(), zip(*drawn, strict=True), strict=True):
            parameter.grad = torch.stack(parts).mean(0)
        optimizer.step()
        after_step()
    return weights(model), optimizer.state_dict()


def with_adam(steps: int, broadcasts: bool, *, hidden: bool, alike: bool = False) -> list[Tensor]:
    """Move weights by the mean of the steps that each rank's own AdamW takes from them.

    hidden: it has no momentum, and weights move by the mean of these steps that the momentum makes of them. alike: by the same
    gradients on all ranks.
    """
    own = [Two() for _ in range(RANKS)]
    optimizers = [adamw(model, betas=(0.0, BETAS[1])) if hidden else adamw(model) for model in own]
    now = weights(own[0])
    moving = [torch.zeros_like(each) for each in now]
    for step in range(-broadcasts, steps):
        for rank, (model, optimizer) in enumerate(zip(own, optimizers, strict=True)):
            given = gradients(0 if alike else rank, step) if step >= 0 else [torch.zeros_like(each) for each in now]
            for parameter, weight, grad in zip(model.parameters(), now, given, strict=True):
                parameter.data.copy_(weight)
                parameter.grad = grad.clone()
            optimizer.step()
        means = [torch.stack(parts).mean(0) for parts in zip(*map(weights, own), strict=True)]
        if hidden and step >= 0:
            for move, mean, weight in zip(moving, means, now, strict=True):
                move.lerp_(mean - weight, 1 - BETAS[0])
            now = [weight + move for weight, move in zip(now, moving, strict=True)]
        else:
            now = means
    return now


# Training by a door.


def training(door: str, made: Callable[[Two], Optimizer], spec: Any = SPEC, **options: Any) -> Training:
    model = Two()
    return Training(door, model, spec, inner=made(model), **options)


def step_once(run: Training, rank: int, step: int, apart: bool = False) -> None:
    run.optimizer.zero_grad()
    run.whole(gradients(rank, step)).backward()
    if apart:
        run.optimizer.synchronize()
    with run.optimizer.skip_synchronize() if apart else contextlib.nullcontext():
        run.optimizer.step()


def broadcast(run: Training, door: str) -> None:
    """Send rank 0's state to all, as Horovod's users do at the start, and after an elastic reset."""
    if door != DDP:
        hvd.broadcast_parameters(run.model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(run.optimizer, root_rank=0)


def train(
    door: str, case: str, *, resumed: bool = False, apart: bool = False, changes: bool = False, **options: Any
) -> list[Tensor]:
    """Train with known gradients, from the start or from the middle of torch's own training.

    apart: end each backward pass by synchronize(), before the step. changes: begin with an exchange of gradients.
    """
    rate, first, rank = 0.05 / RANKS if "op" in options else 0.05, STEPS if resumed else 0, doors.rank(door)
    options |= {"spec": "dense"} if changes else {}
    run = training(door, lambda model: sgd(model, case, rate), **options)
    after_step = schedule(case, run.optimizer)
    if resumed:
        trained, state = with_sgd(case)
        for parameter, weight in zip(run.model.parameters(), trained, strict=True):
            parameter.data.copy_(weight)
        run.optimizer.load_state_dict(state)
    broadcast(run, door)
    later = {4: SPEC, 8: "dense:feedback=true", 12: SPEC} if changes else {}
    for step in range(first, first + STEPS):
        if step in later:
            run.handle.change(later[step])
        step_once(run, rank, step, apart)
        after_step()
    assert all(group["momentum"] > 0 for group in run.optimizer.param_groups), "the user's values are shown between steps"
    return weights(run.model)


def train_adam(door: str, spec: str, **options: Any) -> list[list[Tensor]]:
    """Train with Adam. Return the weights after a few steps, and in the end."""
    run, rank, found = training(door, adamw, spec, **options), doors.rank(door), []
    broadcast(run, door)
    for step in range(STEPS):
        if step == FEW:
            found.append(weights(run.model))
        step_once(run, rank, step)
    return [*found, weights(run.model)]


def scaled(spec: str) -> list[list[Tensor]]:
    """Train by DDP with a loss scale that doubles on the way."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    run, found = training(DDP, adamw, spec, scaler=scaler), []
    for step in range(STEPS):
        if step == FEW:
            found.append(weights(run.model))
        run.optimizer.zero_grad()
        scaler.scale(run.whole(gradients(dist.get_rank(), step))).backward()
        run.apply(scaler)
    return [*found, weights(run.model)]


# By what is trained: the doors, the options, the case of torch's own training that it must equal, and its steps.
RUNS: dict[str, tuple[tuple[str, ...], dict[str, Any], str, int]] = {
    **{case: (EVERY, {"case": case}, case, STEPS) for case in SETTINGS if case != "schedule"},
    "schedule": (EVERY, {"case": "schedule", "spec": LEFT}, "schedule", STEPS),
    "kept": (EVERY, {"case": "nesterov", "spec": LEFT}, "nesterov", STEPS),
    "resumed": (DOORS, {"case": "nesterov", "resumed": True}, "nesterov", 2 * STEPS),
    "resumed, apart": (DOORS, {"case": "nesterov", "resumed": True, "apart": True}, "nesterov", 2 * STEPS),
    "not given": (DOORS, {"case": "nesterov", "given": False}, "nesterov", STEPS),
    "changed": (EVERY, {"case": "momentum alone", "changes": True}, "momentum alone", STEPS),
    "changed, nesterov": ((DDP,), {"case": "nesterov", "changes": True}, "nesterov", STEPS),
    "changed, sum": (DOORS, {"case": "momentum alone", "changes": True, "op": hvd.Sum}, "momentum alone", STEPS),
    # With half the rate a sum over two ranks is the mean; the decay counts once for each rank.
    "sum": (DOORS, {"case": "momentum alone", "op": hvd.Sum}, "momentum alone", STEPS),
}


def program(door: str) -> dict[Any, Any]:
    doors.join(door)
    found: dict[Any, Any] = {name: train(door, **options) for name, (at, options, *_) in RUNS.items() if door in at}
    found |= {("adam", spec): train_adam(door, spec) for spec in (SPEC, LEFT)}
    if door == DDP:
        found |= {("adam", spec, "scaled"): scaled(spec) for spec in (SPEC, LEFT)}
        found["uneven"] = (uneven(SPEC), uneven(None))
    return found


def uneven(spec: str | None) -> list[Tensor]:
    """One rank has more batches than the other, which goes on exchanging without a step of its own."""
    run = training(DDP, lambda model: sgd(model, "momentum alone"), spec)
    with run.whole.join():
        for step in range(6 + 3 * dist.get_rank()):
            step_once(run, dist.get_rank(), step)
    return weights(run.model)


outcomes = ranks.once(lambda door: ranks.launch(program, RANKS, door))


@pytest.mark.parametrize("door, name", [(door, name) for name, (at, *_) in RUNS.items() for door in at])
def test_training_with_sgd_is_torchs_own(door: str, name: str) -> None:
    """From its start or its middle, with an optimizer that is given or not, and where the spec changes on the way."""
    *_, case, steps = RUNS[name]
    for found in outcomes(door):
        close(found[name], with_sgd(case, steps, broadcasts=door != DDP and "resumed" not in name)[0])


# The doors, and what tells one of a door's trainings from its plain one.
adam_by_doors = pytest.mark.parametrize("door, more", [*((door, ()) for door in EVERY), (DDP, ("scaled",))])


@adam_by_doors
def test_training_with_adam_that_keeps_its_momentum_is_by_the_mean_of_the_ranks_own_steps(door: str, more: Any) -> None:
    for found in outcomes(door):
        for weights, steps in zip(found[("adam", LEFT, *more)], (FEW, STEPS), strict=True):
            close(weights, with_adam(steps, door != DDP, hidden=False))


@adam_by_doors
def test_training_with_adam_is_by_a_momentum_of_the_ranks_steps_without_one(door: str, more: Any) -> None:
    for found in outcomes(door):
        close(found[("adam", SPEC, *more)][0], with_adam(FEW, door != DDP, hidden=True))


@pytest.mark.parametrize("door", EVERY)
def test_the_replicas_are_equal(door: str) -> None:
    first, second = outcomes(door)
    for name in first:
        one, other = (each[name][1] if "adam" in name else each[name] for each in (first, second))
        if name != "uneven":
            assert all(map(torch.equal, one, other)), name


def test_a_rank_without_batches_trains_on_as_under_ddp() -> None:
    for found in outcomes(DDP):
        close(*found["uneven"])
