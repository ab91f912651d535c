"""A training with known gradients beside torch's own SGD on their mean: the two must end with the same weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

STEPS = 18
SPEC = "topk:ratio=1,wire=exact"
SETTINGS: dict[str, dict[str, Any]] = {
    "momentum and weight decay": {"momentum": 0.9, "weight_decay": 0.1},
    "nesterov": {"momentum": 0.8, "weight_decay": 0.1, "nesterov": True},
    "schedule": {"momentum": 0.9, "weight_decay": 0.05},
    "half the weight decay": {"momentum": 0.9, "weight_decay": 0.05},
    "two groups": {"momentum": 0.9},
    "momentum alone": {"momentum": 0.9},
}


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


def sgd(model: Any, case: str, lr: float = 0.05) -> torch.optim.SGD:
    """Make the optimizer of a case."""
    groups: Any = [{"params": [model.a], "weight_decay": 0.2}, {"params": [model.b], "lr": lr / 2}]
    return torch.optim.SGD(groups if case == "two groups" else model.parameters(), lr=lr, **SETTINGS[case])


def schedule(case: str, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Make the call that follows every step: OneCycleLR writes the momentum."""
    if case != "schedule":
        return lambda: None
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=2 * STEPS + 1).step


def alone(case: str, ranks: int, steps: int = STEPS, broadcasts: bool = False) -> tuple[list[Tensor], dict[str, Any]]:
    """Train with torch alone. Return the weights and the optimizer's state.

    broadcasts: begin with the step without gradients that hvd.broadcast_optimizer_state() makes. It applies the weight decay.
    """
    model = Two()
    optimizer = sgd(model, case)
    after_step = schedule(case, optimizer)
    if broadcasts:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    for step in range(steps):
        drawn = [gradients(rank, step) for rank in range(ranks)]
        for parameter, parts in zip(model.parameters(), zip(*drawn, strict=True), strict=True):
            parameter.grad = torch.stack(parts).mean(0)
        optimizer.step()
        after_step()
    return [each.detach().clone() for each in model.parameters()], optimizer.state_dict()


def check(weights: list[Tensor], case: str, ranks: int, steps: int = STEPS, broadcasts: bool = False) -> None:
    """Compare weights with those of torch alone."""
    for own, wanted in zip(weights, alone(case, ranks, steps, broadcasts)[0], strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-4, atol=1e-5)
