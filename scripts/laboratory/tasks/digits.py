"""Scikit-learn's handwritten digits in a fixed split, with an MLP of 8.5 M parameters or a small convolutional net."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from laboratory.tasks.task import Arrays, Batch, Job, Settings, shares

# The number of pictures, of 1,797, that are never trained on.
HELD_OUT = 360

# The width of the hidden layers.
WIDTH = 2048


class Digits(NamedTuple):
    """Pictures of 8 x 8 grey values in [0, 1], flat, and the digits that they show."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


def load() -> Digits:
    """Load the data in the fixed split."""
    from sklearn.datasets import load_digits

    pictures, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.as_tensor(pictures, dtype=torch.float32)[order] / 16
    y = torch.as_tensor(labels, dtype=torch.int64)[order]
    return Digits(x[HELD_OUT:], y[HELD_OUT:], x[:HELD_OUT], y[:HELD_OUT])


def model(seed: int = 0, width: int = WIDTH) -> nn.Sequential:
    """Make an MLP 64-width-width-width-10 with ReLU. The seed decides the weights."""
    torch.manual_seed(seed)
    sizes = [64, width, width, width]
    hidden = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, 10))


def conv(seed: int, width: int) -> nn.Sequential:
    """Make a net from flat 8 x 8 pictures to ten digits: two convolutions, two linear layers."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * width, 4 * width),
        nn.ReLU(),
        nn.Linear(4 * width, 10),
    )


def batches(digits: Digits, rank: int, ranks: int, batch: int, seed: int = 0) -> Iterator[Batch]:
    """Yield this rank's share of every batch, without end."""
    for own in shares(len(digits.train_y), rank, ranks, batch, torch.Generator().manual_seed(seed)):
        yield digits.train_x[own], digits.train_y[own]


def accuracy(trained: nn.Module, digits: Digits) -> float:
    """Return the share of held-out pictures that are classified correctly."""
    with torch.no_grad():
        return float((trained(digits.test_x).argmax(1) == digits.test_y).float().mean())


def job(net: Callable[[int, int], nn.Module], settings: Settings, seed: int, ranks: int, arrays: Arrays) -> Job:
    """Make the digits with a net of this seed and width."""
    data, made = load(), net(seed, settings.width)
    parts = [batches(data, rank, ranks, settings.batch, seed) for rank in range(ranks)]
    return Job(made, parts, functional.cross_entropy, lambda: 100 * accuracy(made.eval(), data))
