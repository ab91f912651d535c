"""A bucket's tensors in launches of as many as one takes, and the scratch that measures them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gradcomp.native import extension
from gradcomp.native.extension import MOST_PIECES, Array, scratch_words
from gradcomp.native.memory import Memory

# Tensors of one launch, their layers, and their place in the flat bucket. None stands for all of it.
Chunk = tuple[Sequence[Array], slice | None, slice | None]


def chunks_of(pieces: Sequence[Array]) -> list[Chunk]:
    """List the launches."""
    if len(pieces) <= MOST_PIECES:
        return [(pieces, None, None)]
    chunks: list[Chunk] = []
    at = 0
    for first in range(0, len(pieces), MOST_PIECES):
        part = pieces[first : first + MOST_PIECES]
        stop = at + sum(map(Tensor.numel, part))
        chunks.append((part, slice(first, first + len(part)), slice(at, stop)))
        at = stop
    return chunks


def part_of(array: Array | None, span: slice | None) -> Array:
    """Slice an array, unless the part is all of it: a view costs 1.5 us."""
    return array if array is None or span is None else array[span]


def lend_scratch(n: int, pieces: Sequence[Array], like: Array, memory: Memory) -> Array:
    """Lend scratch for the moments of n entries in these pieces, or for the sums of their squares."""
    words = scratch_words(extension.native, "collect", like.is_cuda, n, len(pieces))
    return memory.scratch("measuring", words, like)
