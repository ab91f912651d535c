"""Kernels between a bucket's gradients, each read and written in place, and one flat array."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradcomp.native import extension
from gradcomp.native.extension import MOST_PIECES, Array, queue, scratch_words
from gradcomp.native.kernels.pieces import chunks_of, lend_scratch, part_of
from gradcomp.native.memory import Memory


def flatten(grads: Sequence[Array], flat: Array) -> None:
    """Copy the gradients into flat, one after the other, cast to float32."""
    if len(grads) <= MOST_PIECES:
        extension.native.flatten(grads, flat, **queue(flat))
        return
    for part, _, place in chunks_of(grads):
        extension.native.flatten(part, part_of(flat, place), **queue(flat))


def scratch_of_squares(grads: Sequence[Tensor], squares: Tensor) -> Tensor | None:
    """Make scratch for sum_squares() of gradients of these sizes. Return None if one launch does not take them."""
    if len(grads) > MOST_PIECES:
        return None
    words = scratch_words(extension.native, "collect", squares.is_cuda, sum(map(Tensor.numel, grads)), len(grads))
    return torch.empty(words, dtype=torch.int32, device=squares.device)


def sum_squares(grads: Sequence[Array], squares: Array, memory: Memory | None = None, scratch: Array | None = None) -> None:
    """Sum the squares of each gradient in float64: squares[i] <- sum of grads[i]^2.

    scratch: that of scratch_of_squares(), for one launch.
    """
    if scratch is not None:
        extension.native.sum_squares(grads, squares, scratch, **queue(squares))
        return
    memory = memory or Memory()
    for part, layers, _ in chunks_of(grads):
        scratch = lend_scratch(sum(map(Tensor.numel, part)), part, squares, memory)
        extension.native.sum_squares(part, part_of(squares, layers), scratch, **queue(squares))


def collect(
    grads: Sequence[Array],
    flat: Array,
    flag: Array,
    *,
    moments: Array | None = None,
    memory: Memory | None = None,
) -> None:
    """Copy the gradients into flat, as flatten() does, with 0 for entries that are not finite.

    flag: becomes 1 if an entry was not finite, otherwise 0.
    moments: float64[layers, MOMENTS], filled in the same pass with statistics of each layer.
    """
    memory = memory or Memory()
    chunks = chunks_of(grads)
    flags = flag if len(chunks) == 1 else memory.scratch("flags", len(chunks), flat)
    for i, (part, layers, place) in enumerate(chunks):
        to = part_of(flat, place)
        extension.native.collect(
            part,
            to,
            flag if len(chunks) == 1 else flags[i : i + 1],
            part_of(moments, layers),
            None if moments is None else lend_scratch(to.numel(), part, flat, memory),
            **queue(flat),
        )
    if len(chunks) > 1:
        flag[:] = flags.max()


def spread(
    flat: Array, grads: Sequence[Array], scale: float = 1.0, marks: Array | None = None, first: Array | None = None
) -> bool:
    """Write scale * flat into the gradients, each in its own memory and type. Return whether flat was wiped.

    marks: of an update, to skip its zeros. first: a copy of its first entry: marked lines become zeros, too, if one launch is
    enough.
    """
    if marks is None and len(grads) <= MOST_PIECES:
        extension.native.spread(flat, flat, None, grads, scale, False, **queue(flat))
        return False
    chunks = chunks_of(grads)
    marks = marks if len(chunks) == 1 else None  # chunks do not end where lines do
    wipes = marks is not None and first is not None
    for part, _, place in chunks:
        own_first = first if first is not None else flat if place is None else flat[:1]
        extension.native.spread(part_of(flat, place), own_first, marks, part, scale, wipes, **queue(flat))
    return wipes


def write_header(header: Array, flag: Array | None = None) -> None:
    """Write the header of a payload in which all entries travel: 0, and the flag, 0 where there is none."""
    extension.native.write_header(flag, header, **queue(header))


def offer_all(residual: Array, taken: Array, flag: Array | None = None, scale: float = 1.0) -> Array:
    """Copy scale times the residual into taken, with NaN in taken[0] if the flag is set. Return taken. The residual stays."""
    extension.native.offer_all(residual, flag, taken, scale, **queue(residual))
    return taken


def settle_all(residual: Array, update: Array, kept_share: float = 0.0) -> None:
    """Multiply the residual by kept_share if update[0] is finite; otherwise leave it."""
    extension.native.settle_all(residual, update, kept_share, **queue(residual))
