"""The reference job: scikit-learn's handwritten digits, split once and for all, and a model of 8.56 M parameters."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

HELD_OUT = 360  # of 1797 pictures, never trained on
WIDTH = 2048


class Digits(NamedTuple):
    """Pictures of 8 x 8 grey values in [0, 1], flat, and which digits they show."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


def load() -> Digits:
    """The data, split in the same way every time."""
    from sklearn.datasets import load_digits

    pictures, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.as_tensor(pictures, dtype=torch.float32)[order] / 16
    y = torch.as_tensor(labels, dtype=torch.int64)[order]
    return Digits(x[HELD_OUT:], y[HELD_OUT:], x[:HELD_OUT], y[:HELD_OUT])


def model(seed: int = 0, width: int = WIDTH) -> nn.Sequential:
    """64-2048-2048-2048-10 with ReLU between; the same weights for the same seed."""
    torch.manual_seed(seed)
    sizes = [64, width, width, width]
    hidden = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, 10))


def batches(digits: Digits, rank: int, ranks: int, batch: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's share of every batch, without end: an epoch's order is common to all ranks, and each takes its own part."""
    generator = torch.Generator().manual_seed(seed)
    together = batch * ranks
    if together > len(digits.train_y):
        raise ValueError(f"{ranks} ranks of {batch} pictures are more than the {len(digits.train_y)} there are to train on")
    while True:
        order = torch.randperm(len(digits.train_y), generator=generator)
        for first in range(0, len(order) - together + 1, together):
            own = order[first + rank * batch : first + (rank + 1) * batch]
            yield digits.train_x[own], digits.train_y[own]


def accuracy(trained: nn.Module, digits: Digits) -> float:
    """The share of held-out pictures that are told right."""
    with torch.no_grad():
        return float((trained(digits.test_x).argmax(1) == digits.test_y).float().mean())
