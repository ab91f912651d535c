"""Prepared data: the arrays of a source, decoded once and kept in the folder of finished work.

A prepared file is named after its source and the digest of what it was made from. The key of a record holds this name.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch

from laboratory.refusal import Refused
from laboratory.tasks.table import TASKS
from laboratory.tasks.task import Arrays, Source


def prepare(task: str, source: Source, data: Path | None, folder: Path) -> str:
    """Prepare a task's data in a folder unless they are there. Return the file's name. `data`: the folder given by --data."""
    path = None
    if source.file is not None:
        wanted = f"{source.file} ({source.content})"
        if data is None:
            raise Refused(f"--tasks {task} needs --data FOLDER: a folder with {wanted}; add --data, or leave {task} out")
        path = data / source.file
        if not path.is_file():
            raise Refused(
                f"--data {str(data)!r} has no {wanted}, which --tasks {task} needs; put it there, or leave {task} out"
            )
    raw = source.raw(path)
    name = f"{source.name}-{hashlib.sha256(raw).hexdigest()[:12]}.pt"
    made = place(folder, name)
    if not made.exists():
        made.parent.mkdir(parents=True, exist_ok=True)
        part = made.with_name(name + ".part")
        torch.save(source.decode(raw), part)
        part.replace(made)
    return name


def files(tasks: Sequence[str], data: Path | None, folder: Path) -> dict[str, str]:
    """Prepare the data of the tasks that have some, and name the files."""
    sources = {task: TASKS[task].source for task in tasks}
    return {task: prepare(task, source, data, folder) for task, source in sources.items() if source is not None}


def place(folder: Path, name: str) -> Path:
    """Return the path of a prepared file."""
    return folder / "data" / name


@functools.lru_cache(maxsize=1)
def load(path: Path) -> Arrays:
    """Load a prepared file. The last one stays in memory for the runs that follow."""
    arrays: Arrays = torch.load(path, weights_only=True)
    return arrays
