"""A training beside its definition: the mean of the directions that each rank's Adam makes moves the weights.

Every 8 steps, a rank compares its gradients with the mean of all ranks, and 4 steps later its directions become longer.
"""

from __future__ import annotations

from typing import Any

import torch
from sgd_twin import STEPS, Two, gradients
from torch import Tensor

SETTINGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1, "betas": (0.9, 0.95)}),
}
RATE = 0.02


def made(model: Two, case: str) -> torch.optim.Optimizer:
    """Make the optimizer of a case."""
    kind, settings = SETTINGS[case]
    optimizer: torch.optim.Optimizer = kind(model.parameters(), lr=RATE, **settings)
    return optimizer


def expected(case: str, ranks: int, steps: int = STEPS, broadcasts: bool = False) -> list[Tensor]:
    """Return the weights after some steps. A rank's direction is how its own optimizer moves weights of zero.

    broadcasts: begin with the step without gradients that hvd.broadcast_optimizer_state() makes. It applies the weight decay.
    """
    kind, settings = SETTINGS[case]
    weights = [each.detach().clone() for each in Two().parameters()]
    if broadcasts:
        weights = [weight * (1 - RATE * settings.get("weight_decay", 0)) for weight in weights]
    own = [[torch.zeros_like(weight) for weight in weights] for _ in range(ranks)]
    optimizers = [kind(zeros, lr=1.0, **{**settings, "weight_decay": 0}) for zeros in own]
    sums, factors = torch.zeros(ranks, 2, dtype=torch.float64), [1.0] * ranks
    for step in range(steps):
        directions = []
        if step % 8 == 4 and step > 8:
            factors = [float((of_own / of_mean).sqrt().clamp(1 / ranks, ranks)) for of_mean, of_own in sums]
        if step % 8 == 0 and step > 0:
            sums = 0.7 * sums + torch.stack([compared(rank, step, optimizers, own) for rank in range(ranks)])
        for rank, (zeros, optimizer) in enumerate(zip(own, optimizers, strict=True)):
            for weight, grad in zip(zeros, gradients(rank, step), strict=True):
                weight.zero_()
                weight.grad = grad
            optimizer.step()
            directions.append([factors[rank] * weight for weight in zeros])
        for weight, parts in zip(weights, zip(*directions, strict=True), strict=True):
            weight.mul_(1 - RATE * settings.get("weight_decay", 0)).add_(torch.stack(parts).mean(0), alpha=RATE)
    return weights


def compared(rank: int, step: int, optimizers: list[torch.optim.Optimizer], weights: list[list[Tensor]]) -> Tensor:
    """The squares of the mean's entries and of a rank's own, weighed by the moments before the step. All entries count here."""
    sums, ranks = torch.zeros(2, dtype=torch.float64), len(weights)
    for i in range(len(weights[rank])):
        seconds = [optimizers[r].state[weights[r][i]]["exp_avg_sq"].double() for r in range(ranks)]
        velocity = optimizers[rank].state[weights[rank][i]]["exp_avg"].double()
        counts = (velocity.square() / (seconds[rank] * torch.stack(seconds).mean(0))).nan_to_num(0.0)
        drawn = [gradients(other, step)[i].double() for other in range(ranks)]
        for j, each in enumerate((torch.stack(drawn).mean(0), drawn[rank])):
            sums[j] += (counts * each.square()).sum()
    return sums


def check(weights: list[Tensor], case: str, ranks: int, broadcasts: bool = False) -> None:
    """Compare weights with those of the definition."""
    for own, wanted in zip(weights, expected(case, ranks, broadcasts=broadcasts), strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-4, atol=1e-5)
