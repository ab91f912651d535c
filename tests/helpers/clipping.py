"""Gradients of chosen norms, the optimizers that step by them, and clips before step(), beside those of torch alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from doors import DDP, Training
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

STEPS, BOUND = 12, 3.0
NORMS = 2.0, 2.8, 2.8, 64.0, 1.0, 8.0, 0.5, 16.0
ALL = "topk:ratio=1,wire=exact"
LEFT = f"{ALL},momentum=0"  # the optimizer keeps its momentum


class Three(nn.Module):
    """Three layers that compute nothing: the gradient of the loss is what is given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b, self.c = (nn.Parameter(torch.randn(shape)) for shape in ((30, 20), (7,), (5, 4)))

    def forward(self, given: list[Tensor]) -> Tensor:
        return torch.stack([(own * each).sum() for own, each in zip(self.parameters(), given, strict=True)]).sum()


def gradients(step: int, rank: int = 0) -> list[Tensor]:
    """Draw gradients with these norms, about: some are longer than the bound."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    drawn = [torch.randn(shape, generator=generator) for shape in ((30, 20), (7,), (5, 4))]
    return [NORMS[step % len(NORMS)] * each / 25 for each in drawn]


def sgd(parameters: Any, **more: Any) -> Optimizer:
    return SGD(parameters, **{"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3, **more})


def nesterov(parameters: Any) -> Optimizer:
    return sgd(parameters, nesterov=True, weight_decay=0.0)


def plain(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.05)


def adamw(parameters: Any) -> Optimizer:
    return AdamW(parameters, lr=0.02, weight_decay=0.1, betas=(0.9, 0.95))


def ascent(parameters: Any) -> Optimizer:
    return sgd(parameters, maximize=True)


def adamw_ascent(parameters: Any) -> Optimizer:
    return AdamW(parameters, lr=0.02, maximize=True)


MADE: dict[str, Callable[[Any], Optimizer]] = {
    each.__name__: each for each in (sgd, nesterov, plain, adamw, ascent, adamw_ascent)
}


def spec_for(made: Any) -> str:
    """Return the spec by which an optimizer steps as torch's: Adam's moment is divided by a root of its own step."""
    return LEFT if made in (adamw, adamw_ascent) else ALL


def finish(run: Training, clip: Callable[[], Any]) -> None:
    """Clip where the door's users do, and step."""
    if run.door == DDP:
        clip()
        run.optimizer.step()
        return
    run.optimizer.synchronize()
    clip()
    with run.optimizer.skip_synchronize():
        run.optimizer.step()


def by_norm(model: nn.Module, bound: float = BOUND, **more: Any) -> Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), bound, **more)


def train(
    door: str | None, made: Any, clip: Callable[..., Any] = by_norm, spec: str = "", given: Any = gradients, **more: Any
) -> list[Tensor]:
    """Train by a door, or in one process by torch alone. Return the weights."""
    model = Three()
    run = None if door is None else Training(door, model, spec or spec_for(made), inner=made(model.parameters()), **more)
    optimizer = made(model.parameters()) if run is None else run.optimizer
    for step in range(STEPS):
        optimizer.zero_grad()
        (model if run is None else run.whole)(given(step)).backward()
        if run is None:
            clip(model)
            optimizer.step()
        else:
            finish(run, lambda: clip(model))
    return [each.detach().clone() for each in model.parameters()]


def equal(found: list[Tensor], wanted: list[Tensor], rounding: float = 1e-6) -> None:
    for each, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(each, other, rtol=rounding, atol=rounding)
