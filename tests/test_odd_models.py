"""Models of unusual make by every door: layouts, types, shapes and sharing that a gradient must get through."""

from __future__ import annotations

import warnings
from typing import Any

import doors
import horovod.torch as hvd
import pytest
import ranks
import small_net
import torch
from doors import DDP, EVERY, Training
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradcomp.native.extension import MOST_PIECES

pytestmark = pytest.mark.slow

STEPS = 4
SPARSE = "topk:ratio=0.05"
SPECS = ("dense", "topk:ratio=1,wire=exact", SPARSE)
every_door = pytest.mark.parametrize("door", EVERY)


class Shifted(nn.Module):
    """A 0-d parameter, one without entries, and one that is a strided view of its layer's transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 6)
        self.layer.weight = nn.Parameter(self.layer.weight.detach().t().contiguous().t())
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.alone = nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale + self.empty.sum() + self.alone.sum()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.middle, self.out = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8)
        self.out.weight = self.into.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.middle(torch.tanh(self.into(x)))))


class Many(nn.Module):
    """More parameters in a bucket than go into one launch of a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.randn(1 + i % 8)) for i in range(MOST_PIECES + 9))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(x[0, : part.numel()] * part).sum() for part in self.parts])


class Turned(nn.Module):
    """Its gradients are assigned in another memory order than its parameters have."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 5))
        for layer in self.layers:
            layer.weight.register_post_accumulate_grad_hook(turn)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def turn(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad.t().contiguous().t()
    assert not parameter.grad.is_contiguous()


def channels_last() -> nn.Module:
    layers = [nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 4, 2, padding=1), nn.Conv2d(4, 3, 2), nn.Flatten()]
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3))
    model[1].requires_grad_(False)
    return model


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


class Mixed(nn.Module):
    """float32, bfloat16 and float16 in one bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8).bfloat16(), nn.Linear(8, 3).half()

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x).bfloat16()).half())


MODELS: dict[str, Any] = {
    "channels last": channels_last,
    "turned gradients": Turned,
    "0-d, empty and strided": Shifted,
    "frozen": frozen,
    "tied": Tied,
    "many": Many,
    "bfloat16": lambda: plain().bfloat16(),
    "float16": lambda: plain().half(),
    "mixed": Mixed,
}


def make(model: str) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[model]()


def step(model: nn.Module, turn: int, rank: int) -> None:
    """A backward pass over examples of this rank's own."""
    generator = torch.Generator().manual_seed(100 * turn + rank)
    x = torch.randn(4, 8, generator=generator)
    dtypes = {p.dtype for p in model.parameters()}
    model(x.to(*dtypes) if len(dtypes) == 1 else x).float().square().mean().backward()


def alone(door: str, name: str) -> Tensor:
    """Train with DDP alone, or with an hvd.allreduce of each gradient, in float32, since Horovod takes no bfloat16."""
    model = make(name)
    whole = DistributedDataParallel(model, bucket_cap_mb=0.02) if door == DDP else model
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for turn in range(STEPS):
        optimizer.zero_grad()
        step(whole, turn, doors.rank(door))
        own = {n: p.grad for n, p in model.named_parameters() if p.grad is not None and p.numel()} if door != DDP else {}
        started = {
            n: hvd.allreduce_async(grad.float().contiguous(), name=f"alone.{n}", op=hvd.Average) for n, grad in own.items()
        }
        for n, grad in own.items():
            grad.copy_(hvd.synchronize(started[n]))
        optimizer.step()
    return small_net.weights(model)


def trained(door: str, name: str, spec: str) -> Tensor:
    """Train by a door. The residual has the parameters' shapes, and they keep their types."""
    model = make(name)
    shapes = {n: (p.shape, p.dtype) for n, p in model.named_parameters()}
    run = Training(door, model, spec, lr=0.1, bucket_mb=0.02 if door == DDP else 25)
    for turn in range(STEPS):
        run.optimizer.zero_grad()
        step(run.whole, turn, doors.rank(door))
        run.optimizer.step()
    assert shapes == {n: (p.shape, p.dtype) for n, p in model.named_parameters()}
    if spec == SPARSE:
        residual = run.residual()
        assert all(left.shape == shapes[n][0] for n, left in residual.items()) and any(left.any() for left in residual.values())
    return run.weights


def program(door: str) -> dict[Any, Any]:
    """Train every model without gradcomp, then with every spec."""
    doors.join(door)
    warnings.filterwarnings("ignore", message="Grad strides")  # torch's own, of turned gradients
    found: dict[Any, Any] = {name: alone(door, name) for name in MODELS}
    return found | {(name, spec): trained(door, name, spec) for name in MODELS for spec in SPECS}


found = ranks.once(lambda door: ranks.launch(program, 2, door))


@every_door
@pytest.mark.parametrize("spec", SPECS[:2])
@pytest.mark.parametrize("model", MODELS)
def test_with_nothing_left_out_training_is_the_one_without_gradcomp(model: str, spec: str, door: str) -> None:
    """Gradients to the last bit: on two ranks a sum has one order, and half of it is exact. Updates to their own rounding."""
    epsilon = {"bfloat16": 2.0**-8, "mixed": 2.0**-8, "float16": 2.0**-11}.get(model, 2.0**-21)
    for rank in found(door):
        if spec == "dense":
            assert rank[model, spec].isfinite().all() and torch.equal(rank[model, spec], rank[model])
        else:  # each rank's step has rounded the weights that the other's is added to
            torch.testing.assert_close(rank[model, spec], rank[model], rtol=STEPS * epsilon, atol=STEPS * epsilon)


@every_door
@pytest.mark.parametrize("model", MODELS)
def test_all_ranks_hold_the_same_weights_to_the_last_bit(model: str, door: str) -> None:
    first, second = (rank[model, SPARSE] for rank in found(door))
    assert first.isfinite().all() and torch.equal(first, second)
    assert not torch.equal(first, found(door)[0][model, "dense"])  # something was left out indeed
