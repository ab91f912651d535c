"""momentum=auto by every door: with everything sent, training is torch's own with SGD, and the mean of directions with Adam."""

from __future__ import annotations

import contextlib
import itertools
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
every_door = pytest.mark.parametrize("door", EVERY)


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


def nesterov(model: Two) -> Optimizer:
    return sgd(model, "nesterov")


def adamw(model: Two) -> Optimizer:
    return AdamW(model.parameters(), lr=ADAM_RATE, weight_decay=DECAY, betas=BETAS)


def schedule(case: str, optimizer: Optimizer) -> Callable[[], None]:
    """Make the call that follows every step: OneCycleLR writes the momentum."""
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


def with_adam(broadcasts: bool) -> list[Tensor]:
    """Move weights by the mean of the ranks' directions: of how each rank's own Adam moves weights of zero.

    Every 8 steps, a rank compares its gradients with the mean of all, and 4 steps later its directions become longer.
    """
    found = [(1 - ADAM_RATE * DECAY if broadcasts else 1) * weight for weight in weights(Two())]
    own = [[torch.zeros_like(weight) for weight in found] for _ in range(RANKS)]
    optimizers = [AdamW(zeros, lr=1.0, weight_decay=0, betas=BETAS) for zeros in own]
    sums, factors = torch.zeros(RANKS, 2, dtype=torch.float64), [1.0] * RANKS
    for step in range(STEPS):
        directions = []
        if step % 8 == 4 and step > 8:
            factors = [float((of_own / of_mean).sqrt().clamp(1 / RANKS, RANKS)) for of_mean, of_own in sums]
        if step % 8 == 0 and step > 0:
            sums = 0.7 * sums + torch.stack([compared(rank, step, optimizers, own) for rank in range(RANKS)])
        for rank, (zeros, optimizer) in enumerate(zip(own, optimizers, strict=True)):
            for weight, grad in zip(zeros, gradients(rank, step), strict=True):
                weight.zero_()
                weight.grad = grad
            optimizer.step()
            directions.append([factors[rank] * weight for weight in zeros])
        for weight, parts in zip(found, zip(*directions, strict=True), strict=True):
            weight.mul_(1 - ADAM_RATE * DECAY).add_(torch.stack(parts).mean(0), alpha=ADAM_RATE)
    return found


def compared(rank: int, step: int, optimizers: list[AdamW], own: list[list[Tensor]]) -> Tensor:
    """Sum the squares of the mean's entries and of a rank's own, weighed by the moments before the step."""
    sums = torch.zeros(2, dtype=torch.float64)
    for i in range(len(own[rank])):
        seconds = [optimizers[r].state[own[r][i]]["exp_avg_sq"].double() for r in range(RANKS)]
        velocity = optimizers[rank].state[own[rank][i]]["exp_avg"].double()
        counts = (velocity.square() / (seconds[rank] * torch.stack(seconds).mean(0))).nan_to_num(0.0)
        drawn = [gradients(other, step)[i].double() for other in range(RANKS)]
        for j, each in enumerate((torch.stack(drawn).mean(0), drawn[rank])):
            sums[j] += (counts * each.square()).sum()
    return sums


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
    door: str, case: str, *, resumed: bool = False, apart: bool = False, leaves: bool = False, **options: Any
) -> list[Tensor]:
    """Train with known gradients, from the start or from the middle of torch's own training.

    apart: end each exchange by synchronize(), before the step. leaves: leave the momentum to the optimizer from the middle on,
    for three steps.
    """
    rate, first, rank = 0.05 / RANKS if "op" in options else 0.05, STEPS if resumed else 0, doors.rank(door)
    run = training(door, lambda model: sgd(model, case, rate), **options)
    after_step = schedule(case, run.optimizer)
    if resumed:
        trained, state = with_sgd(case)
        for parameter, weight in zip(run.model.parameters(), trained, strict=True):
            parameter.data.copy_(weight)
        run.optimizer.load_state_dict(state)
    broadcast(run, door)
    for step in range(first, first + STEPS):
        if leaves and step in (4, 7):
            run.handle.change(LEFT if step == 4 else SPEC)
        step_once(run, rank, step, apart)
        after_step()
        if step == first + 2 and door != DDP:
            hvd.broadcast_optimizer_state(run.optimizer, root_rank=0)
    assert all(group["momentum"] > 0 for group in run.optimizer.param_groups), "the user's values are shown between steps"
    return weights(run.model)


def train_adam(door: str, **options: Any) -> tuple[list[Tensor], int]:
    """Train with Adam; then leave the moments to it. Return the weights before that, and the number of its states."""
    run, rank = training(door, adamw, **options), doors.rank(door)
    broadcast(run, door)
    for step in range(STEPS):
        step_once(run, rank, step)
        if step == 2 and door != DDP:
            hvd.broadcast_optimizer_state(run.optimizer, root_rank=0)  # no weight decay
    trained = weights(run.model)
    run.handle.change(LEFT)  # and torch's own Adam goes on
    for step in range(2):
        step_once(run, rank, step)
    return trained, len(run.optimizer.state)


# By what is trained: the doors, the options, the case of torch's own training that it must equal, and its steps.
RUNS: dict[str, tuple[tuple[str, ...], dict[str, Any], str, int]] = {
    **{case: (EVERY, {"case": case}, case, STEPS) for case in SETTINGS},
    "resumed": (DOORS, {"case": "nesterov", "resumed": True}, "nesterov", 2 * STEPS),
    "resumed, apart": (DOORS, {"case": "nesterov", "resumed": True, "apart": True}, "nesterov", 2 * STEPS),
    "not given": (DOORS, {"case": "nesterov", "given": False}, "nesterov", STEPS),
    "left": (EVERY, {"case": "momentum alone", "leaves": True}, "momentum alone", STEPS),
    "left, nesterov": ((DDP,), {"case": "nesterov", "leaves": True}, "nesterov", STEPS),
    "left, sum": (DOORS, {"case": "momentum alone", "leaves": True, "op": hvd.Sum}, "momentum alone", STEPS),
    # With half the rate a sum over two ranks is the mean; the decay counts once.
    "sum": (DOORS, {"case": "momentum and weight decay", "op": hvd.Sum}, "half the weight decay", STEPS),
}
ADAM = [(door, "mean") for door in EVERY] + [(door, "sum") for door in DOORS] + [(DDP, "scaled")]


def program(door: str) -> dict[Any, Any]:
    doors.join(door)
    found: dict[Any, Any] = {name: train(door, **options) for name, (at, options, *_) in RUNS.items() if door in at}
    found["adam", "mean"] = train_adam(door)
    if door == DDP:
        return found | of_ddp()
    found["adam", "sum"] = train_adam(door, op=hvd.Sum)
    return found


outcomes = ranks.once(lambda door: ranks.launch(program, RANKS, door))


@pytest.mark.parametrize("door, name", [(door, name) for name, (at, *_) in RUNS.items() for door in at])
def test_training_with_sgd_is_torchs_own(door: str, name: str) -> None:
    """From its start or its middle, with an optimizer that is given or not, and where the momentum is left for some steps."""
    *_, case, steps = RUNS[name]
    for found in outcomes(door):
        close(found[name], with_sgd(case, steps, broadcasts=door != DDP and "resumed" not in name)[0])


@pytest.mark.parametrize("door, kind", ADAM)
def test_training_with_adam_is_by_the_mean_of_the_ranks_directions(door: str, kind: str) -> None:
    """Adam's step does not depend on the length of gradients: a sum must not move the weights further."""
    for found in outcomes(door):
        close(found["adam", kind][0], with_adam(broadcasts=door != DDP))


@every_door
def test_after_a_change_adam_has_moments_of_its_own(door: str) -> None:
    for found in outcomes(door):
        assert found["adam", "mean"][1] == 2


# Under DDP alone.


def of_ddp() -> dict[Any, Any]:
    return {
        ("adam", "scaled"): (scaled(), 0),
        "uneven": (uneven(SPEC), uneven(None)),
        "found": found_later(),
        "left, adam": left(),
    }


def uneven(spec: str | None) -> list[Tensor]:
    """One rank has more batches than the other, which goes on exchanging without a step of its own."""
    run = training(DDP, lambda model: sgd(model, "momentum alone"), spec)
    with run.whole.join():
        for step in range(6 + 3 * dist.get_rank()):
            step_once(run, dist.get_rank(), step)
    return weights(run.model)


def scaled() -> list[Tensor]:
    """Train with a loss scale that doubles on the way."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    run = training(DDP, adamw, scaler=scaler)
    for step in range(STEPS):
        run.optimizer.zero_grad()
        scaler.scale(run.whole(gradients(dist.get_rank(), step))).backward()
        run.apply(scaler)
    return weights(run.model)


def found_later() -> tuple[list[Tensor], list[Tensor]]:
    """Train with an optimizer that attach() was not given: it is known after its first step."""
    run, plain = training(DDP, adamw, given=False), Two()
    other = adamw(plain)
    for step in range(STEPS):  # with the same gradient on all ranks, the mean of directions is Adam's of the mean
        step_once(run, 0, step)
        other.zero_grad()
        plain(gradients(0, step)).backward()
        other.step()
    assert all(bool(each.any()) for each in moments(run)["second"].values())
    return weights(run.model), weights(plain)


def moments(run: Training) -> dict[str, dict[str, Tensor]]:
    adam: dict[str, dict[str, Tensor]] = run.layers()["adam"]
    return adam


def left() -> list[Tensor]:
    """Leave the moments to the optimizer from the middle on: it begins with their means over the ranks."""
    run = training(DDP, adamw)
    for step in range(STEPS):
        if step == 5:
            own = moments(run)
            run.handle.change(LEFT)
            for (name, parameter), (key, array) in itertools.product(
                run.model.named_parameters(), {"exp_avg": "first", "exp_avg_sq": "second"}.items()
            ):
                mean = own[array][name] / RANKS
                dist.all_reduce(mean)
                torch.testing.assert_close(run.optimizer.state[parameter][key].flatten(), mean)
                assert run.optimizer.state[parameter]["step"] == 5
        step_once(run, dist.get_rank(), step)
    return weights(run.model)


@pytest.mark.parametrize("name", ["uneven", "found"])
def test_training_is_the_one_beside_it(name: str) -> None:
    """A rank without batches exchanges on; an optimizer that was not given is found."""
    for found in outcomes(DDP):
        close(*found[name])


def test_the_optimizer_gets_the_means_of_the_ranks_moments() -> None:
    first, *others = (found["left, adam"] for found in outcomes(DDP))
    for other in others:
        assert all(map(torch.equal, first, other)), "the replicas differ"


def joined_alone() -> list[Tensor]:
    """A rank without any batch never steps, and never finds the optimizer: it must ask for nothing else than the others."""
    ranks.join()
    run = training(DDP, adamw, given=False)
    with run.whole.join():
        for step in range(20 if dist.get_rank() == 0 else 0):
            step_once(run, 0, step)
    return weights(run.model)


def test_a_rank_without_any_batch_asks_for_what_the_others_ask() -> None:
    first, second = ranks.launch(joined_alone, 2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
