"""Text that every Python has: its language reference as help() shows it, as numbers, cut into sequences."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

# Predicted characters in one sequence.
LENGTH = 64


class Corpus(NamedTuple):
    """Characters as numbers: positions in the alphabet."""

    alphabet: str
    train: Tensor
    held_out: Tensor


@functools.cache
def load() -> Corpus:
    """Load all topics in the order of their names. The last tenth is held out."""
    from pydoc_data.topics import topics

    text = "".join(topics[name] for name in sorted(topics))
    alphabet = "".join(sorted(set(text)))
    places = {character: place for place, character in enumerate(alphabet)}
    numbers = torch.tensor([places[character] for character in text])
    first = 9 * len(text) // 10
    return Corpus(alphabet, numbers[:first], numbers[first:])


def batches(train: Tensor, rank: int, ranks: int, batch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's share of every batch, without end. All ranks draw the same positions and take different ones."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(LENGTH + 1)
    while True:
        drawn = torch.randint(len(train) - LENGTH, (ranks * batch,), generator=generator)
        own = drawn[rank * batch : (rank + 1) * batch]
        part = train[own.unsqueeze(1) + offsets]
        yield part[:, :-1], part[:, 1:]


def sequences(held_out: Tensor) -> Tensor:
    """Cut the text into sequences, each with the character that follows it. The rest is dropped."""
    count = (len(held_out) - 1) // LENGTH
    return torch.stack([held_out[LENGTH * i : LENGTH * (i + 1) + 1] for i in range(count)])
