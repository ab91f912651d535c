"""The tasks: for each a model, batches for every rank, a loss, a score at the end, and default settings."""

from __future__ import annotations

from torch import nn
from torch.nn import functional

from laboratory.tasks import cifar, digits, nets, texts
from laboratory.tasks.task import Arrays, Job, Settings, Task


def mlp(settings: Settings, seed: int, ranks: int, arrays: Arrays) -> Job:
    """Make the digits with an MLP."""
    return _pictures(digits.model(seed, settings.width), settings, seed, ranks)


def conv(settings: Settings, seed: int, ranks: int, arrays: Arrays) -> Job:
    """Make the digits with convolutions."""
    return _pictures(nets.conv(seed, settings.width), settings, seed, ranks)


def _pictures(model: nn.Module, settings: Settings, seed: int, ranks: int) -> Job:
    data = digits.load()
    parts = [digits.batches(data, rank, ranks, settings.batch, seed) for rank in range(ranks)]
    return Job(model, parts, functional.cross_entropy, lambda: 100 * digits.accuracy(model.eval(), data))


# The transformer's settings.
OF_BYTES = Settings(
    lr=0.001, steps=500, momentum=0.9, batch=8, width=160, clip=1.0, weight_decay=0.1, warmup=0.05, beta2=0.95, depth=4
)

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
    "cifar": Task(
        Settings(lr=0.1, steps=800, momentum=0.9, batch=32, width=16, clip=0, weight_decay=0.0005, warmup=0.05, depth=1),
        "accuracy in %",
        True,
        cifar.job,
        "pictures of CIFAR-10 with a residual net of 0.3 million parameters",
        cifar.SOURCE,
        schedule="cosine",
    ),
    "cifar-large": Task(
        Settings(lr=0.1, steps=500, momentum=0.9, batch=32, width=48, clip=0, weight_decay=0.0005, warmup=0.05, depth=1),
        "accuracy in %",
        True,
        cifar.job,
        "the same pictures with a residual net of 2.8 million parameters",
        cifar.SOURCE,
        schedule="cosine",
    ),
    "shakespeare": Task(
        OF_BYTES,
        "perplexity of a byte",
        False,
        texts.job,
        "Shakespeare's bytes with a transformer of 1.3 million parameters",
        texts.SHAKESPEARE,
        "adamw",
        "cosine",
    ),
    "library": Task(
        OF_BYTES,
        "perplexity of a byte",
        False,
        texts.job,
        "the bytes of Python's standard library with the same transformer",
        texts.LIBRARY,
        "adamw",
        "cosine",
    ),
}
