"""The jobs of a study, each a model, its data cut into batches for every rank, and the score that counts in the end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import digits
import torch
from torch import Tensor, nn
from torch.nn import functional

from studylib import corpus, nets

Batch = tuple[Tensor, Tensor]

CHUNK = 64
"""Held-out sequences that are read at once."""


class Settings(NamedTuple):
    """How one task is trained; every field can be set on the command line."""

    lr: float
    steps: int
    momentum: float
    batch: int
    width: int
    clip: float


WHOLE = ("steps", "batch", "width")
"""The settings that are whole numbers."""


class Job(NamedTuple):
    """A task made ready for one seed."""

    model: nn.Module
    batches: list[Iterator[Batch]]
    loss: Callable[[Tensor, Tensor], Tensor]
    score: Callable[[], float]


class Task(NamedTuple):
    """What is the same for all seeds."""

    defaults: Settings
    score_name: str
    higher_is_better: bool
    make: Callable[[Settings, int, int], Job]
    about: str


def mlp(settings: Settings, seed: int, ranks: int) -> Job:
    return _pictures(digits.model(seed, settings.width), settings, seed, ranks)


def conv(settings: Settings, seed: int, ranks: int) -> Job:
    return _pictures(nets.conv(seed, settings.width), settings, seed, ranks)


def resnet(settings: Settings, seed: int, ranks: int) -> Job:
    return _pictures(nets.resnet(seed, settings.width), settings, seed, ranks)


def _pictures(model: nn.Module, settings: Settings, seed: int, ranks: int) -> Job:
    data = digits.load()
    parts = [digits.batches(data, rank, ranks, settings.batch, seed) for rank in range(ranks)]
    return Job(model, parts, functional.cross_entropy, lambda: 100 * digits.accuracy(model.eval(), data))


def text(settings: Settings, seed: int, ranks: int) -> Job:
    data = corpus.load()
    model = nets.Characters(seed, len(data.alphabet), settings.width)
    parts = [corpus.batches(data.train, rank, ranks, settings.batch, seed) for rank in range(ranks)]
    return Job(model, parts, _character_loss, lambda: _perplexity(model, data.held_out))


def _character_loss(said: Tensor, meant: Tensor) -> Tensor:
    return functional.cross_entropy(said.flatten(0, 1), meant.flatten())


def _perplexity(model: nn.Module, held_out: Tensor) -> float:
    """e to the mean loss of a held-out character, each sequence read from a fresh start, as in training."""
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
        "the digits of scripts/digits.py with its model of 8.5 million parameters",
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
