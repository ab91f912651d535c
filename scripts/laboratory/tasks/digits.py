"""The reference task: scikit-learn's handwritten digits in a fixed split, and a model of 8.5 M parameters."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from laboratory.refusal import Refused

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


def batches(digits: Digits, rank: int, ranks: int, batch: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's share of every batch, without end. All ranks draw the same order and take different parts of it."""
    generator = torch.Generator().manual_seed(seed)
    together = batch * ranks
    if together > len(digits.train_y):
        raise Refused(f"{ranks} ranks of {batch} pictures are more than the {len(digits.train_y)} to train on; lower one")
    while True:
        order = torch.randperm(len(digits.train_y), generator=generator)
        for first in range(0, len(order) - together + 1, together):
            own = order[first + rank * batch : first + (rank + 1) * batch]
            yield digits.train_x[own], digits.train_y[own]


def accuracy(trained: nn.Module, digits: Digits) -> float:
    """Return the share of held-out pictures that are classified correctly."""
    with torch.no_grad():
        return float((trained(digits.test_x).argmax(1) == digits.test_y).float().mean())
