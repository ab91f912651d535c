"""The tasks: for each a model, batches for every rank, a loss, a score at the end, and default settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from laboratory.tasks import corpus, digits, nets

Batch = tuple[Tensor, Tensor]

# Held-out sequences that are read at once.
CHUNK = 64

# The settings that are whole numbers.
WHOLE = ("steps", "batch", "width")


class Settings(NamedTuple):
    """The settings of a training. Each can be set on the command line."""

    lr: float
    steps: int
    momentum: float
    batch: int
    width: int
    clip: float


class Job(NamedTuple):
    """A task with its model and batches, for one seed."""

    model: nn.Module
    batches: list[Iterator[Batch]]
    loss: Callable[[Tensor, Tensor], Tensor]
    score: Callable[[], float]


class Task(NamedTuple):
    """A task for all seeds."""

    defaults: Settings
    score_name: str
    higher_is_better: bool
    make: Callable[[Settings, int, int], Job]
    about: str


def mlp(settings: Settings, seed: int, ranks: int) -> Job:
    """Make the digits with an MLP."""
    return _pictures(digits.model(seed, settings.width), settings, seed, ranks)


def conv(settings: Settings, seed: int, ranks: int) -> Job:
    """Make the digits with convolutions."""
    return _pictures(nets.conv(seed, settings.width), settings, seed, ranks)


def resnet(settings: Settings, seed: int, ranks: int) -> Job:
    """Make the digits with residual blocks."""
    return _pictures(nets.resnet(seed, settings.width), settings, seed, ranks)


def _pictures(model: nn.Module, settings: Settings, seed: int, ranks: int) -> Job:
    data = digits.load()
    parts = [digits.batches(data, rank, ranks, settings.batch, seed) for rank in range(ranks)]
    return Job(model, parts, functional.cross_entropy, lambda: 100 * digits.accuracy(model.eval(), data))


def text(settings: Settings, seed: int, ranks: int) -> Job:
    """Make the characters of the language reference."""
    data = corpus.load()
    model = nets.Characters(seed, len(data.alphabet), settings.width)
    parts = [corpus.batches(data.train, rank, ranks, settings.batch, seed) for rank in range(ranks)]
    return Job(model, parts, _character_loss, lambda: _perplexity(model, data.held_out))


def _character_loss(logits: Tensor, characters: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), characters.flatten())


def _perplexity(model: nn.Module, held_out: Tensor) -> float:
    """Return e to the mean loss of a held-out character. Each sequence starts afresh, as in training."""
    sequences = corpus.sequences(held_out)
    with torch.no_grad():
        losses = [_character_loss(model(part[:, :-1]), part[:, 1:]) * len(part) for part in sequences.split(CHUNK)]
    mean = float(sum(losses)) / len(sequences)
    return math.exp(min(mean, 700.0)) if math.isfinite(mean) else math.nan


TASKS = {
    "mlp": Task(
        Settings(lr=0.02, steps=600, momentum=0.9, batch=8, width=digits.WIDTH, clip=0),
        "accuracy in %",
        True,
        mlp,
        "handwritten digits with an MLP of 8.5 million parameters",
    ),
    "conv": Task(
        Settings(lr=0.02, steps=1500, momentum=0.9, batch=16, width=32, clip=0),
        "accuracy in %",
        True,
        conv,
        "the same digits with a small convolutional net",
    ),
    "resnet": Task(
        Settings(lr=0.02, steps=1500, momentum=0.9, batch=16, width=32, clip=0),
        "accuracy in %",
        True,
        resnet,
        "the same digits with residual blocks and batch normalisation",
    ),
    "text": Task(
        Settings(lr=0.4, steps=4000, momentum=0.9, batch=4, width=384, clip=1.0),
        "perplexity",
        False,
        text,
        "the characters of Python's language reference with an LSTM",
    ),
}
