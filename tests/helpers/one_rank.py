"""A training alone in DDP, in the test's own process: with gradcomp, or torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradcomp

SPEC = "topk:ratio=1,wire=exact"


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.02, momentum=0.9, nesterov=True, weight_decay=0.05)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 0.01, weight_decay=0.1)


Body = Callable[[DistributedDataParallel, torch.optim.Optimizer, int], None]


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))


def loss(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(6, 7, generator=generator), torch.randn(6, 3, generator=generator)
    error: Tensor = (model(x) - y).square().mean()
    return error


def train(spec: str | None, optimizer_of: Any, body: Body, steps: int = 12, given: bool = True) -> tuple[nn.Module, Any, Any]:
    """Train alone in DDP. Return the model, the optimizer and the handle."""
    model = net()
    wrapped = DistributedDataParallel(model)
    optimizer = optimizer_of(model.parameters())
    handle = None if spec is None else gradcomp.ddp.attach(wrapped, spec, optimizer=optimizer if given else None)
    for step in range(steps):
        body(wrapped, optimizer, step)
    return model, optimizer, handle


def plain(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    loss(model, step).backward()
    optimizer.step()


def same(optimizer_of: Any, body: Body, spec: str = SPEC, **options: Any) -> None:
    """Compare a training with torch's own."""
    ours, theirs = (train(each, optimizer_of, body, **options)[0] for each in (spec, None))
    for own, wanted in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-4, atol=1e-5)
