"""The tasks: for each a model, batches for every rank, a loss, a score at the end, and default settings."""

from __future__ import annotations

from functools import partial

from laboratory.tasks import cifar, digits, texts
from laboratory.tasks.task import Settings, Task

OF_DIGITS = Settings(lr=0.02, steps=600, momentum=0.9, batch=8, width=digits.WIDTH, clip=0)
OF_PICTURES = Settings(lr=0.1, steps=800, momentum=0.9, batch=32, width=16, clip=0, weight_decay=0.0005, warmup=0.05, depth=1)
OF_BYTES = Settings(
    lr=0.001, steps=500, momentum=0.9, batch=8, width=160, clip=1.0, weight_decay=0.1, warmup=0.05, beta2=0.95, depth=4
)

ACCURACY, PERPLEXITY = ("accuracy in %", True), ("perplexity of a byte", False)

TASKS = {
    "mlp": Task(
        OF_DIGITS, *ACCURACY, partial(digits.job, digits.model), "handwritten digits with an MLP of 8.5 million parameters"
    ),
    "conv": Task(
        OF_DIGITS._replace(steps=1500, batch=16, width=32),
        *ACCURACY,
        partial(digits.job, digits.conv),
        "the same digits with a small convolutional net",
    ),
    "cifar": Task(
        OF_PICTURES,
        *ACCURACY,
        cifar.job,
        "pictures of CIFAR-10 with a residual net of 0.3 million parameters",
        cifar.SOURCE,
        schedule="cosine",
    ),
    "shakespeare": Task(
        OF_BYTES,
        *PERPLEXITY,
        texts.job,
        "Shakespeare's bytes with a transformer of 1.3 million parameters",
        texts.SHAKESPEARE,
        "adamw",
        "cosine",
    ),
}
TASKS |= {
    "cifar-large": TASKS["cifar"]._replace(
        defaults=OF_PICTURES._replace(steps=500, width=48),
        about="the same pictures with a residual net of 2.8 million parameters",
    ),
    "library": TASKS["shakespeare"]._replace(
        about="the bytes of Python's standard library with the same transformer", source=texts.LIBRARY
    ),
}
