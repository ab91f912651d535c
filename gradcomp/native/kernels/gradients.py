"""Kernels between a bucket's gradients, each read and written in place, and one flat array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradcomp.native import extension
from gradcomp.native.extension import LINE, MOST_PIECES, UNKNOWN_PEAK, Array, count, on_cuda, queue
from gradcomp.native.kernels.sparse import Mask
from gradcomp.native.memory import Memory


class _Chunk(NamedTuple):
    """Gradients that fit one launch, the layers that they belong to, and their place in the flat bucket."""

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
    """Copy the gradients into flat, one after the other, cast to float32."""
    for part, _, place in _chunks(grads):
        extension.native.flatten(part, flat[place], **queue(flat))


def _lend_scratch(grads: Sequence[Array], like: Array, memory: Memory) -> Array:
    """Lend scratch for the moments of accumulate(), or for sum_squares()."""
    words = extension.native.accumulate_scratch(on_cuda(like), sum(map(count, grads)), len(grads))
    return memory.scratch("measuring", words, like)


def sum_squares(grads: Sequence[Array], squares: Array, memory: Memory | None = None) -> None:
    """Sum the squares of each gradient in float64: squares[i] <- sum of grads[i]^2."""
    memory = memory or Memory()
    for part, layers, _ in _chunks(grads):
        extension.native.sum_squares(part, squares[layers], _lend_scratch(part, squares, memory), **queue(squares))


class Adaptive(NamedTuple):
    """What a step by Adam's kind has beside the momentum.

    velocity <- momentum * velocity + fresh * g;  second <- decay * second + fresh_square * g * g
    residual <- residual + (of_gradient * g + of_velocity * velocity) / (root_scale * sqrt(second) + epsilon)

    waiting * g takes the numerator's place for an entry that has waited (see Mask).

    second: the second moment; None = there is none, nor the division.
    """

    second: Array | None
    fresh: float = 1.0
    of_gradient: float = 0.0
    of_velocity: float = 1.0
    decay: float = 0.0
    fresh_square: float = 0.0
    root_scale: float = 1.0
    epsilon: float = 0.0
    waiting: float = 0.0


def accumulate(
    grads: Sequence[Array],
    residual: Array,
    velocity: Array | None,
    flag: Array,
    momentum: float = 0.0,
    nesterov: bool = False,
    *,
    scales: Array | None = None,
    loss_scale: Array | None = None,
    moments: Array | None = None,
    raw: bool = False,
    peaks: Array | None = None,
    adaptive: Adaptive | None = None,
    mask: Mask | None = None,
    whole: bool = True,
    of_residual: float = 1.0,
    memory: Memory | None = None,
) -> None:
    """Add gradients to a residual.

    velocity <- momentum * velocity + scales * grads;  residual <- of_residual * residual + velocity

    adaptive: what Adam keeps beside; nesterov must then be False. mask: knows which entries have waited, and is told of those
    that were empty; whole: an entry without residual was. False where what waits may lie on another rank.
    loss_scale: float32[1]; gradients are divided by it. flag: becomes 1 if an entry was not finite, otherwise 0.
    moments: float64[layers, MOMENTS], filled in the same pass with statistics of each layer's new residual (raw: gradient).
    peaks: the result of peaks(); becomes each line's largest magnitude, with which a take on a CPU skips lines.
    """
    memory = memory or Memory()
    rule = Adaptive(None, 1, 1, momentum) if nesterov else adaptive or Adaptive(None)
    chunks = _chunks(grads)
    if len(chunks) > 1 and peaks is not None:  # chunks do not end where lines do
        peaks[:] = UNKNOWN_PEAK
        peaks = None
    flags = flag if len(chunks) == 1 else memory.scratch("flags", len(chunks), residual)
    for i, (part, layers, place) in enumerate(chunks):
        extension.native.accumulate(
            part,
            None if scales is None else scales[layers],
            loss_scale,
            residual[place],
            None if velocity is None else velocity[place],
            None if rule.second is None else rule.second[place],
            None if mask is None else mask.sent_in[place],
            flags[i : i + 1],
            None if moments is None else moments[layers],
            peaks,
            None if moments is None else _lend_scratch(part, residual, memory),
            of_residual,
            momentum,
            *rule[1:],
            0 if mask is None else mask.step,
            whole,
            raw,
            **queue(residual),
        )
    if len(chunks) > 1:
        flag[:] = flags.max()


def peaks(n: int, device: torch.device) -> Tensor | None:
    """Make the peaks of n entries, for accumulate to fill and takes to read; None on a GPU, where a take reads everything."""
    if device.type != "cpu" or not extension.native.built_with_cpu:
        return None
    return torch.full((-(-n // LINE),), UNKNOWN_PEAK, dtype=torch.int32)


def spread(
    flat: Array,
    grads: Sequence[Array],
    scale: float = 1.0,
    marks: Array | None = None,
    *,
    loss_scale: Array | None = None,
    residual: Array | None = None,
    verdict: Array | None = None,
    step: int = 1,
) -> None:
    """Write scale * loss_scale * flat into the gradients, each in its own memory and type.

    marks: of an update, to skip its zeros. residual: gets what casts leave out.
    verdict: int32[1]; tells add_back() whether the bucket failed in this step.
    """
    chunks = _chunks(grads)
    marks = marks if len(chunks) == 1 else None  # chunks do not end where lines do
    for part, _, place in chunks:
        kept = None if residual is None else residual[place]
        rest = (marks, part, loss_scale, kept, verdict, scale, step)
        extension.native.spread(flat[place], flat[:1], *rest, **queue(flat))


def may_have_failed(verdicts: Tensor, step: int) -> bool:
    """Look for verdicts of this step or a later one. On a GPU, which would have to be waited for, the answer is True."""
    if on_cuda(verdicts) or not extension.native.built_with_cpu:
        return True
    return have_failed(verdicts, step)


def have_failed(verdicts: Tensor, step: int) -> bool:
    """Look for verdicts of this step or a later one. This waits for the device."""
    return int(verdicts.max()) >= 2 * step


def add_back(
    grads: Sequence[Array],
    residual: Array,
    verdicts: Array,
    bucket: int,
    scale: float = 1.0,
    *,
    loss_scale: Array | None = None,
    step: int = 1,
) -> None:
    """Add what spread() delivered to the residual if a verdict is of this step, unless this bucket itself failed."""
    for part, _, place in _chunks(grads):
        extension.native.add_back(part, residual[place], loss_scale, verdicts, bucket, scale, step, **queue(residual))


def offer_all(residual: Array, taken: Array, flag: Array | None = None, scale: float = 1.0) -> Array:
    """Copy scale times the residual into taken, with NaN in taken[0] if the flag is set. Return taken. The residual stays."""
    extension.native.offer_all(residual, flag, taken, scale, **queue(residual))
    return taken


def settle_all(residual: Array, update: Array, keep: float = 0.0) -> None:
    """Multiply the residual by keep if update[0] is finite; otherwise leave it."""
    extension.native.settle_all(residual, update, keep, **queue(residual))
