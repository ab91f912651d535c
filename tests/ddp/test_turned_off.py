"""gradcomp is turned off in mid-training: a checkpoint of model and optimizer goes on without it, as if it had never been."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from known_gradients import BUCKET_MB, SHAPES, Model, gradient
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradcomp

pytestmark = pytest.mark.slow

BEFORE, AFTER = 6, 5
OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=0.01),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, 0.01, weight_decay=0.01),
}


def program(name: str, spec: str, alike: bool) -> dict[str, Tensor]:
    """Train with a spec, turn it off, and go on by DDP alone from the checkpoint. alike: the ranks have equal gradients."""
    ranks.join()
    rank = 0 if alike else dist.get_rank()
    model = Model(rank)
    whole, optimizer = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB), OPTIMIZERS[name](model.parameters())
    handle = gradcomp.ddp.attach(whole, spec, optimizer=optimizer)
    train(whole, optimizer, range(BEFORE - 1))
    handle.change("dense:momentum=0")
    train(whole, optimizer, range(BEFORE - 1, BEFORE))
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    plain = Model(rank)
    plain.load_state_dict(saved["model"])
    own = OPTIMIZERS[name](plain.parameters())
    own.load_state_dict(saved["optimizer"])
    train(DistributedDataParallel(plain), own, range(BEFORE, BEFORE + AFTER))
    return {key: parameter.detach() for key, parameter in plain.named_parameters()}


def train(whole: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        whole(step).backward()
        optimizer.step()


def by_torch(name: str, world: int) -> dict[str, Tensor]:
    """Train in float64, with torch's optimizer alone."""
    weights = {key: nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for key, shape in SHAPES.items()}
    optimizer = OPTIMIZERS[name](weights.values())
    for step in range(BEFORE + AFTER):
        for key, weight in weights.items():
            weight.grad = sum(gradient(key, rank, step).double() for rank in range(world)) / world
        optimizer.step()
    return {key: weight.detach() for key, weight in weights.items()}


@pytest.mark.parametrize("name, alike", [("SGD", False), ("AdamW", True)])
def test_with_everything_sent_it_is_torchs_training_throughout(name: str, alike: bool) -> None:
    wanted = by_torch(name, 1 if alike else 2)
    for own in ranks.launch(program, 2, name, "topk:ratio=1,wire=exact", alike):
        for key, weight in wanted.items():
            torch.testing.assert_close(own[key].double(), weight, rtol=1e-4, atol=1e-5)


def test_all_that_waits_is_sent_before() -> None:
    """With plain SGD, the updates until the checkpoint are all gradients until then."""

    found = ranks.launch(all_sent, 2)
    for own in found:
        for key, weight in own.items():
            sums = sum(gradient(key, rank, step).double() for rank in range(2) for step in range(BEFORE)) / 2
            torch.testing.assert_close(weight.double(), -sums, rtol=1e-4, atol=1e-5)


def all_sent() -> dict[str, Tensor]:
    ranks.join()
    model = Model(dist.get_rank())
    whole, optimizer = DistributedDataParallel(model), torch.optim.SGD(model.parameters(), 1.0)
    handle = gradcomp.ddp.attach(whole, "topk:ratio=0.05", optimizer=optimizer)
    train(whole, optimizer, range(BEFORE - 1))
    assert any(bool(waits.any()) for waits in handle.residual().values())
    handle.change("dense:momentum=0")
    train(whole, optimizer, range(BEFORE - 1, BEFORE))
    return {key: parameter.detach() for key, parameter in model.named_parameters()}
