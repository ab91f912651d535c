"""Kernels between a bucket's gradients, each read where it lies, and one flat array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradcomp.native import extension
from gradcomp.native.extension import LINE, MOST_PIECES, UNKNOWN_PEAK, Array, count, on_cuda, queue
from gradcomp.native.memory import Memory


class _Chunk(NamedTuple):
    """As many gradients as fit one launch: which layers they are, and their place in the flat bucket."""

    grads: Sequence[Array]
    layers: slice
    place: slice


def _chunks(grads: Sequence[Array]) -> list[_Chunk]:
    if len(grads) <= MOST_PIECES:
        return [_Chunk(grads, slice(None), slice(None))]
    chunks = []
    at = 0
    for first in range(0, len(grads), MOST_PIECES):
        part = grads[first : first + MOST_PIECES]
        stop = at + sum(map(count, part))
        chunks.append(_Chunk(part, slice(first, first + len(part)), slice(at, stop)))
        at = stop
    return chunks


def flatten(grads: Sequence[Array], flat: Array) -> None:
    """flat <- grads, one after the other, cast to float32."""
    for part, _, place in _chunks(grads):
        extension.native.flatten(part, flat[place], **queue(flat))


def _measuring(grads: Sequence[Array], like: Array, memory: Memory) -> Array:
    """What accumulate's moments and sum_squares need for so many layers."""
    words = extension.native.accumulate_scratch(on_cuda(like), sum(map(count, grads)), len(grads))
    return memory.scratch("measuring", words, like)


def sum_squares(grads: Sequence[Array], squares: Array, memory: Memory | None = None) -> None:
    """squares[i] <- the sum of the squares of grads[i], in float64."""
    memory = memory or Memory()
    for part, layers, _ in _chunks(grads):
        extension.native.sum_squares(part, squares[layers], _measuring(part, squares, memory), **queue(squares))


def accumulate(
    grads: Sequence[Array],
    value: Array,
    velocity: Array | None,
    flag: Array,
    momentum: float = 0.0,
    nesterov: bool = False,
    *,
    scales: Array | None = None,
    moments: Array | None = None,
    raw: bool = False,
    peaks: Array | None = None,
    memory: Memory | None = None,
) -> None:
    """velocity <- momentum * velocity + scales * grads; value <- value + velocity; flag <- whether an entry was not finite.

    moments, float64[layers, MOMENTS]: statistics of each layer's new value (raw: of its gradient) from the same pass.
    peaks: what peaks() gave; each line's largest magnitude, by which a take on a CPU leaves most of the value unread.
    """
    memory = memory or Memory()
    chunks = _chunks(grads)
    if len(chunks) > 1 and peaks is not None:  # chunks do not end where lines do
        peaks[:] = UNKNOWN_PEAK
        peaks = None
    flags = flag if len(chunks) == 1 else memory.scratch("flags", len(chunks), value)
    for i, (part, layers, place) in enumerate(chunks):
        extension.native.accumulate(
            part,
            None if scales is None else scales[layers],
            value[place],
            None if velocity is None else velocity[place],
            flags[i : i + 1],
            None if moments is None else moments[layers],
            peaks,
            None if moments is None else _measuring(part, value, memory),
            momentum,
            nesterov,
            raw,
            **queue(value),
        )
    if len(chunks) > 1:
        flag[:] = flags.max()


def peaks(n: int, device: torch.device) -> Tensor | None:
    """For accumulate to fill and takes to read, of an array of n entries; None on a GPU, where a take reads everything."""
    if device.type != "cpu" or not extension.native.built_with_cpu:
        return None
    return torch.full((-(-n // LINE),), UNKNOWN_PEAK, dtype=torch.int32)


def spread(flat: Array, grads: Sequence[Array], scale: float = 1.0, marks: Array | None = None) -> None:
    """grads <- scale * flat, each in its own memory and type. marks: of an update, by which zeros are not read."""
    chunks = _chunks(grads)
    marks = marks if len(chunks) == 1 else None  # chunks do not end where lines do
    for part, _, place in chunks:
        extension.native.spread(flat[place], marks, part, scale, **queue(flat))


def offer_all(value: Array, taken: Array, flag: Array | None = None) -> Array:
    """taken <- value, which stays until settle_all. Where the flag is set, taken[0] becomes NaN. Returns taken."""
    extension.native.offer_all(value, flag, taken, **queue(value))
    return taken


def settle_all(value: Array, update: Array, keep: float = 0.0) -> None:
    """value <- keep * value, unless the update is not finite (update[0] says so)."""
    extension.native.settle_all(value, update, keep, **queue(value))
