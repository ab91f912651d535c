"""Reads the emulator's counts of what the requests of warps cost."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NAMES = ("requests", "sectors", "shared_requests", "conflicts", "atomics", "same_address")


@contextmanager
def counted(module: Any) -> Iterator[dict[str, int]]:
    """Count the requests of the launches inside; the counts are there at the end."""
    library = ctypes.CDLL(module.__file__)
    library.simt_counts.restype = ctypes.POINTER(ctypes.c_uint64)
    counts: dict[str, int] = {}
    library.simt_count(1)
    try:
        yield counts
    finally:
        counts.update(zip(NAMES, library.simt_counts()[: len(NAMES)], strict=True))
        library.simt_count(0)
