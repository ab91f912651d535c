"""Scikit-learn's handwritten digits in a fixed split, with an MLP of 8.5 M parameters or a small convolutional net."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn import functional

from laboratory.tasks.task import Arrays, Batch, Job, Settings, accuracy, shares

# The number of pictures, of 1,797, that are never trained on.
HELD_OUT = 360

# The width of the hidden layers.
WIDTH = 2048


def load() -> Arrays:
    """Load the data in the fixed split: pictures of 8 x 8 grey values in [0, 1], flat, and the digits that they show."""
    from sklearn.datasets import load_digits

    pictures, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.as_tensor(pictures, dtype=torch.float32)[order] / 16
    y = torch.as_tensor(labels, dtype=torch.int64)[order]
    return {"train_x": x[HELD_OUT:], "train_y": y[HELD_OUT:], "test_x": x[:HELD_OUT], "test_y": y[:HELD_OUT]}


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


def batches(data: Arrays, rank: int, ranks: int, batch: int, seed: int = 0) -> Iterator[Batch]:
    """Yield this rank's share of every batch, without end."""
    for own in shares(len(data["train_y"]), rank, ranks, batch, torch.Generator().manual_seed(seed)):
        yield data["train_x"][own], data["train_y"][own]


def job(net: Callable[[int, int], nn.Module], settings: Settings, seed: int, ranks: int, arrays: Arrays) -> Job:
    """Make the digits with a net of this seed and width."""
    data, made = load(), net(seed, settings.width)
    parts = [batches(data, rank, ranks, settings.batch, seed) for rank in range(ranks)]
    return Job(made, parts, functional.cross_entropy, lambda: accuracy(made, data))
