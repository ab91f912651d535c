"""Text that every Python has: its language reference as help() shows it. Batches, loss and perplexity of any text."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

# Predicted characters in one sequence.
LENGTH = 64

# Held-out sequences that are read at once.
CHUNK = 64


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


def batches(
    train: Tensor, rank: int, ranks: int, batch: int, seed: int, length: int = LENGTH
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's share of every batch, without end. All ranks draw the same positions and take different ones."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(length + 1)
    while True:
        drawn = torch.randint(len(train) - length, (ranks * batch,), generator=generator)
        own = drawn[rank * batch : (rank + 1) * batch]
        part = train[own.unsqueeze(1) + offsets]
        yield part[:, :-1], part[:, 1:]


def sequences(held_out: Tensor, length: int = LENGTH) -> Tensor:
    """Cut the text into sequences, each with the character that follows it. The rest is dropped."""
    count = (len(held_out) - 1) // length
    return torch.stack([held_out[length * i : length * (i + 1) + 1] for i in range(count)])


def loss(logits: Tensor, characters: Tensor) -> Tensor:
    """Return the mean cross-entropy of the characters."""
    return functional.cross_entropy(logits.flatten(0, 1), characters.flatten())


def perplexity(model: nn.Module, held_out: Tensor, length: int = LENGTH) -> float:
    """Return e to the mean loss of a held-out character. Each sequence starts afresh, as in training."""
    every = sequences(held_out, length)
    with torch.no_grad():
        losses = [loss(model(part[:, :-1]), part[:, 1:]) * len(part) for part in every.split(CHUNK)]
    mean = float(sum(losses)) / len(every)
    return math.exp(min(mean, 700.0)) if math.isfinite(mean) else math.nan
