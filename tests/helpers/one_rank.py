"""A small training in DDP on one rank, in the test's own process, with gradcomp or as torch alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from doors import DDP, Training
from torch import Tensor, nn
from torch.optim import Optimizer

SPEC = "topk:ratio=1,wire=exact"
# The optimizer keeps its momentum.
LEFT = f"{SPEC},momentum=0"


def sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, 0.02, momentum=0.9, nesterov=True, weight_decay=0.05)


def adamw(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, 0.01, weight_decay=0.1)


both = pytest.mark.parametrize("optimizer_of", [sgd, adamw])


class Run(Training):
    """A training alone in DDP, with gradcomp where there is a spec."""

    def __init__(self, optimizer_of: Any, spec: str | None = SPEC, layers: Any = nn.Sequential, **options: Any):
        torch.manual_seed(1)
        model = layers(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
        super().__init__(DDP, model, spec, inner=optimizer_of(model.parameters()), **options)

    def loss(self, at: int, model: nn.Module | None = None) -> Tensor:
        generator = torch.Generator().manual_seed(at)
        x, y = torch.randn(6, 7, generator=generator), torch.randn(6, 3, generator=generator)
        error: Tensor = ((self.whole if model is None else model)(x) - y).square().mean()
        return error

    def on(self, steps: range = range(12), body: Body | None = None) -> Run:
        """Train, and return this training."""
        for step in steps:
            (body or plain)(self, step)
        return self


Body = Callable[[Run, int], None]


def plain(run: Run, step: int) -> None:
    run.optimizer.zero_grad()
    run.loss(step).backward()
    run.optimizer.step()


def same(training: Callable[[str | None], Run], spec: str = SPEC) -> None:
    """Compare a training's weights with those of torch alone."""
    ours, theirs = (training(each).model for each in (spec, None))
    for own, wanted in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-4, atol=1e-5)


def accumulate(run: Run, step: int, exchanges: int = 2) -> None:
    run.optimizer.zero_grad()
    for part in range(2):
        with contextlib.nullcontext() if part >= 2 - exchanges else run.whole.no_sync():
            (run.loss(2 * step + part) / 2).backward()
    run.optimizer.step()


def accumulate_alone(run: Run, step: int) -> None:
    accumulate(run, step, exchanges=1)
