"""The tasks: for each a model, batches for every rank, a loss, a score at the end, default settings, and prepared data.

A prepared file has the decoded arrays of a source. It is named after the source and the digest of its bytes, and a record's key
holds this name.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from laboratory.options import Refused
from laboratory.tasks import adapters, cifar, digits, pitch, texts
from laboratory.tasks.task import Arrays, Settings, Source, Task

OF_DIGITS = Settings(lr=0.02, steps=600, momentum=0.9, batch=8, width=digits.WIDTH, clip=0)
OF_PICTURES = Settings(lr=0.1, steps=800, momentum=0.9, batch=32, width=16, clip=0, weight_decay=0.0005, warmup=0.05, depth=1)
OF_BYTES = Settings(
    lr=0.001, steps=500, momentum=0.9, batch=8, width=160, clip=1.0, weight_decay=0.1, warmup=0.05, beta2=0.95, depth=4
)
OF_TONES = Settings(lr=0.0005, steps=200, momentum=0.9, batch=4, width=pitch.CHANNELS[1], clip=0, warmup=0.05, beta2=0.999)

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
    "adapters": Task(
        OF_BYTES._replace(lr=0.004, steps=400, batch=4, width=adapters.WIDTH, weight_decay=0.0, depth=0),
        *PERPLEXITY,
        adapters.job,
        "Shakespeare's bytes with adapters (LoRA) in a transformer that has read Python's library",
        adapters.SOURCE,
        "adamw",
        "cosine",
    ),
    "pitch": Task(
        OF_TONES,
        *ACCURACY,
        pitch.job,
        "the pitch of noisy tones, fine-tuning a net of 0.5 million parameters",
        pitch.SOURCE,
        "adamw",
        "cosine",
    ),
}
TASKS["python"] = TASKS["shakespeare"]._replace(
    about="the bytes of Python's library with a transformer of 1.3 million parameters", source=texts.PYTHON
)
TASKS["python-muon"] = TASKS["python"]._replace(
    about="the same bytes, by Muon for the matrices of its layers and AdamW for all else", optimizer="muon"
)
TASKS["cifar-large"] = TASKS["cifar"]._replace(
    defaults=OF_PICTURES._replace(steps=500, width=48),
    about="the same pictures with a residual net of 2.8 million parameters",
)


def prepare(task: str, source: Source, data: Path | None, folder: Path) -> str:
    """Prepare a task's data in a folder unless they are there. Return the file's name. `data`: the folder given by --data."""
    raw = source.found() if source.found else _given(task, source, data)
    name = f"{source.name}-{hashlib.sha256(raw).hexdigest()[:12]}.pt"
    made = place(folder, name)
    if not made.exists():
        made.parent.mkdir(parents=True, exist_ok=True)
        part = made.with_name(name + ".part")
        torch.save(source.decode(raw), part)
        part.replace(made)
    return name


def _given(task: str, source: Source, data: Path | None) -> bytes:
    """Read a source's file in the folder given by --data."""
    wanted = f"{source.file} ({source.content})"
    if data is None:
        raise Refused(f"--tasks {task} needs --data FOLDER: a folder with {wanted}; add --data, or leave {task} out")
    path = data / source.file
    if not path.is_file():
        raise Refused(f"--data {str(data)!r} has no {wanted}, which --tasks {task} needs; put it there, or leave {task} out")
    return path.read_bytes()


def files(tasks: Sequence[str], data: Path | None, folder: Path) -> dict[str, str]:
    """Prepare the data of the tasks, and name the files: an empty name for a task without data."""
    sources = {task: TASKS[task].source for task in tasks}
    return {task: prepare(task, source, data, folder) if source else "" for task, source in sources.items()}


def place(folder: Path, name: str) -> Path:
    """Return the path of a prepared file."""
    return folder / "data" / name


@functools.lru_cache(maxsize=1)
def load(path: Path | None) -> Arrays:
    """Load a prepared file; nothing of a task without data. The last file stays in memory for the runs that follow."""
    arrays: Arrays = torch.load(path, weights_only=True) if path else {}
    return arrays
