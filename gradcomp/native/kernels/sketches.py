"""Kernels of count sketches."""

from __future__ import annotations

from gradcomp.native import extension
from gradcomp.native.extension import Array, queue, scratch_words
from gradcomp.native.memory import Memory


def sketch(flat: Array, rows: int, seed: int, table: Array, scale: float = 1.0) -> None:
    """Write the count sketch of scale * flat into the table, rows x columns in one array. columns is a multiple of 16."""
    extension.native.sketch(flat, rows, seed, scale, table, **queue(flat))


def heaviest(
    table: Array,
    rows: int,
    seed: int,
    n: int,
    indices: Array,
    estimates: Array,
    memory: Memory | None = None,
    *,
    part: int = 0,
    parts: int = 1,
) -> None:
    """Find the entries, of a part of n, with the largest estimated magnitudes, in index order, ties to the lower index."""
    most = max(indices.numel(), -(-table.numel() // 64))  # the scratch also holds two bits for each cell
    words = scratch_words(extension.native, "heaviest", table.is_cuda, n, most)
    scratch = (memory or Memory()).scratch("heaviest", words, table)
    extension.native.heaviest(table, rows, seed, n, part, parts, indices, estimates, scratch, **queue(table))
