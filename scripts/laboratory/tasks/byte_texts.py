"""Texts as bytes for the transformer: Shakespeare from a file, and the sources of Python's standard library."""

from __future__ import annotations

import hashlib
import platform
import sys
import sysconfig
from pathlib import Path

import numpy
import torch

from laboratory.refusal import Refused
from laboratory.tasks import corpus
from laboratory.tasks.task import Arrays, Job, Settings, Source
from laboratory.tasks.transformer import LENGTH, Transformer

# The first bytes of the library that are used.
LIBRARY_BYTES = 4_000_000

# Packages that some distributions leave out, and those that are tables more than programs.
LEFT_OUT = {"distutils", "encodings", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "tkinter", "turtledemo", "venv"}


def shakespeare_raw(path: Path | None) -> bytes:
    """Read the file."""
    assert path is not None
    return path.read_bytes()


def library_raw(path: Path | None = None) -> bytes:
    """Join sources of the running Python's standard library, without tests, in the order of their paths' digests.

    The order is the same for one version of Python, and mixes all packages, so that the last tenth is like the rest.
    """
    root = Path(path or sysconfig.get_path("stdlib"))
    every = {each.relative_to(root): each for each in root.rglob("*.py")}
    chosen = {own.as_posix(): each for own, each in every.items() if _is_of_the_library(own)}
    ordered = sorted(chosen, key=lambda own: hashlib.sha256(own.encode()).digest())
    text = b"".join(chosen[own].read_bytes() for own in ordered)[:LIBRARY_BYTES]
    if not text:
        raise Refused("this Python's standard library has no .py files to read; leave library out of --tasks")
    return text


def _is_of_the_library(path: Path) -> bool:
    first = path.parts[0].removesuffix(".py")
    return first in sys.stdlib_module_names and first not in LEFT_OUT and not {"test", "tests"} & set(path.parts)


def decode(content: bytes) -> Arrays:
    """Cut off the last tenth for the test."""
    text = torch.from_numpy(numpy.frombuffer(content, numpy.uint8).copy())
    first = 9 * len(text) // 10
    if len(text) - first <= LENGTH:
        raise Refused(f"the text has {len(text)} bytes; its last tenth must be longer than the {LENGTH} of a sequence")
    return {"train": text[:first].clone(), "held_out": text[first:].clone()}


SHAKESPEARE = Source("shakespeare", "tinyshakespeare.txt", "text, read as bytes", shakespeare_raw, decode)
LIBRARY = Source(f"library-{platform.python_version()}", None, "Python's standard library", library_raw, decode)


def job(settings: Settings, seed: int, ranks: int, arrays: Arrays) -> Job:
    """Make the prediction of a text's next byte."""
    train, held_out = arrays["train"].long(), arrays["held_out"].long()
    model = Transformer(seed, settings.width, settings.depth)
    parts = [corpus.batches(train, rank, ranks, settings.batch, seed, LENGTH) for rank in range(ranks)]
    return Job(model, parts, corpus.loss, lambda: corpus.perplexity(model, held_out, LENGTH))
