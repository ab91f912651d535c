"""A model with known gradients, trained under a GradScaler: what is applied and what waits must add up to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

SHAPES = {"wide": (30, 40), "narrow": (70,), "last": (5, 9)}
# Small enough for three buckets.
BUCKET_MB = 0.0003
STEPS = 60
# The step in which rank 1's gradient overflows, and the entry of `narrow`.
OVERFLOW, BAD = 30, 7


def gradient(name: str, rank: int, step: int) -> Tensor:
    """Return the gradient of a parameter, computed without any model."""
    seed = 1000 * step + 100 * rank + list(SHAPES).index(name)
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed))


class Model(nn.Module):
    """Parameters that begin at 0, and a loss that has the known gradients."""

    def __init__(self, rank: int):
        super().__init__()
        self.rank = rank
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def forward(self, step: int) -> Tensor:
        return torch.stack([(self.get_parameter(name) * gradient(name, self.rank, step)).sum() for name in SHAPES]).sum()


def scaler(interval: int) -> Any:
    """Make a scaler that grows after so many good steps."""
    return torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=interval)


def train(model: Model, whole: nn.Module, scaling: Any, overflows: bool, update: Callable[[], None]) -> None:
    """Run the steps. update: finishes a step, after backward. overflows: an entry of rank 1 becomes infinite in one step."""
    for step in range(STEPS):
        model.zero_grad()
        spoiled = None
        if overflows and step == OVERFLOW and model.rank == 1:
            spoiled = model.narrow.register_hook(lambda g: g.index_put((torch.tensor(BAD),), torch.tensor(float("inf"))))
        scaling.scale(whole(step)).backward()
        update()
        if spoiled is not None:
            spoiled.remove()


def wanted(world: int, overflows: bool, momentum: float = 0.0) -> dict[str, Tensor]:
    """Sum the mean gradients of all steps, or their momenta. The entry that overflowed is left out on its rank."""
    sums = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for rank in range(world):
        velocity = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
        for step in range(STEPS):
            for name in SHAPES:
                new = momentum * velocity[name] + gradient(name, rank, step).double()
                ahead = new.clone()
                if overflows and (name, rank, step) == ("narrow", 1, OVERFLOW):
                    new[BAD], ahead[BAD] = velocity[name][BAD], 0.0
                velocity[name] = new
                sums[name] += ahead / world
    return sums


def check(found: list[dict[str, Any]], overflows: bool, momentum: float = 0.0) -> None:
    """Hold that the update applied, and the mean of what waits, are all gradients. found: of each rank."""
    for name, sum_of_gradients in wanted(len(found), overflows, momentum).items():
        waits = torch.stack([own["residual"][name].double() for own in found]).mean(0)
        for own in found:
            torch.testing.assert_close(waits - own["weights"][name].double(), sum_of_gradients, rtol=1e-4, atol=1e-4)
