"""A part of a test in which waiting for the GPU is an error."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def forbidden() -> Iterator[None]:
    """Make torch raise an error where it waits for the GPU.

    torch warns of this mode once, after it has begun. As an error, the warning would leave it on for all later tests.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
