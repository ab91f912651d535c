"""A small model for ranks to train, whoever carries the bytes: its weights, its examples, and training steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Net(nn.Module):
    """Some 12,000 parameters. skip leaves the layer `part` out; the unused layers never get a gradient."""

    def __init__(self, unused: bool = False, width: int = 70):
        super().__init__()
        self.first = nn.Linear(20, width)
        self.second = nn.Linear(width, width)
        self.unused = nn.ModuleList(nn.Linear(5, 5) for _ in range(3 * unused))
        self.part = nn.Linear(width, width)
        self.last = nn.Linear(width, 10)

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        x = functional.relu(self.second(functional.relu(self.first(x))))
        return self.last(x if skip else x + self.part(x))


def net(seed: int = 1, **options: Any) -> Net:
    """Make a model with the same weights on all ranks."""
    torch.manual_seed(seed)
    return Net(**options)


def examples(rank: int, seed: int = 0, size: int = 8) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches without end, different ones for every rank."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    while True:
        yield torch.randn(size, 20, generator=generator), torch.randint(0, 10, (size,), generator=generator)


def backward(model: nn.Module, batch: tuple[Tensor, Tensor], **options: Any) -> None:
    """Run one batch forward and backward."""
    functional.cross_entropy(model(batch[0], **options), batch[1]).backward()


def train(model: nn.Module, optimizer: Any, data: Iterator[tuple[Tensor, Tensor]], steps: int) -> Tensor:
    """Train for so many steps; return the weights."""
    for _ in range(steps):
        optimizer.zero_grad()
        backward(model, next(data))
        optimizer.step()
    return weights(model)


def weights(model: nn.Module) -> Tensor:
    """Return all parameters as one vector."""
    return torch.cat([p.detach().float().flatten() for p in model.parameters()])


def refused(action: Callable[[], Any]) -> str:
    """Return the exception that an action raises, as "Type: text"."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"
