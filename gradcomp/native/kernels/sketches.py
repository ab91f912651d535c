"""Kernels of count sketches."""

from __future__ import annotations

from gradcomp.native import extension
from gradcomp.native.extension import Array, count, on_cuda, queue
from gradcomp.native.memory import Memory


def sketch(value: Array, rows: int, seed: int, table: Array) -> None:
    """table <- a count sketch of value, rows x columns in one flat array; the columns are a multiple of 16."""
    extension.native.sketch(value, rows, seed, table, **queue(value))


def heaviest(
    table: Array, rows: int, seed: int, n: int, indices: Array, estimates: Array, memory: Memory | None = None
) -> None:
    """indices, estimates <- the entries of largest estimated magnitude of n, in index order, ties to the lower index."""
    words = extension.native.heaviest_scratch(on_cuda(table), n, count(indices))
    scratch = (memory or Memory()).scratch("heaviest", words, table)
    extension.native.heaviest(table, rows, seed, n, indices, estimates, scratch, **queue(table))
