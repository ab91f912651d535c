"""Kernels of sparse entries: taking them out of a residual, packing, adding and settling them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradcomp.native import extension
from gradcomp.native.extension import LARGEST, Array, launches, queue, scratch_words
from gradcomp.native.memory import Memory

# Entries of a block of a packed payload, and the bits of a value: its sign, and its power of two.
BLOCK, VALUE_BITS = 1 << 16, 6


def note_sent(ages: Tensor, indices: Tensor, sent: Tensor) -> None:
    """Set the ages of those of these entries that are sent to 0. An index may come twice if it is sent once at most."""
    ages.index_add_(0, indices, torch.where(sent, 0 - ages.index_select(0, indices), 0))


def take_topk(
    residual: Array,
    k: int,
    values: Array,
    indices: Array,
    header: Array,
    ages: Array | None = None,
    flag: Array | None = None,
    memory: Memory | None = None,
) -> None:
    """Take the k entries of largest magnitude out of the residual, in index order, ties to the lower index.

    ages: uint8; become 0 for the taken entries. header <- (k, flag).
    """
    words = scratch_words(extension.native, "take_topk", residual.is_cuda, residual.numel(), k)
    scratch = (memory or Memory()).scratch("topk", words, residual)
    extension.native.take_topk(residual, ages, flag, k, values, indices, header, scratch, **queue(residual))


def take_above(
    residual: Array,
    ends: Array,
    thresholds: Array,
    values: Array,
    indices: Array,
    header: Array,
    ages: Array | None = None,
    flag: Array | None = None,
    memory: Memory | None = None,
) -> None:
    """Take the entries whose magnitude exceeds their layer's threshold out of the residual, in index order.

    The capacity is that of values; if more pass, the largest are taken. ages: see take_topk(). header <- (how many pass, flag).
    """
    words = scratch_words(extension.native, "take_above", residual.is_cuda, residual.numel(), values.numel())
    arrays = (ends, thresholds, values, indices, header, (memory or Memory()).scratch("above", words, residual))
    extension.native.take_above(residual, ages, flag, *arrays, **queue(residual))


class Bar(NamedTuple):
    """The thresholds of layers, which set_thresholds() computes from their moments and lam.

    target: the number of entries to which steer() moves lam; None if lam is fixed.
    """

    moments: Array
    ends: Array
    lam: Array
    thresholds: Array
    pooled: bool = False
    target: int | None = None


def take_topk_and_pack(
    residual: Array,
    k: int,
    payload: Array,
    ages: Array | None = None,
    flag: Array | None = None,
    memory: Memory | None = None,
) -> None:
    """Do what take_topk() and pack_sparse() do: payload <- header, blocks and entries, in bytes. The rounding error stays."""
    words = scratch_words(extension.native, "take_topk_and_pack", residual.is_cuda, residual.numel(), k)
    memory = memory or Memory()
    arrays = payload, memory.scratch("take", words, residual), memory.counters(residual)
    extension.native.take_topk_and_pack(residual, ages, flag, k, *arrays, **queue(residual))


def take_above_and_pack(
    residual: Array,
    bar: Bar,
    capacity: int,
    payload: Array,
    ages: Array | None = None,
    flag: Array | None = None,
    memory: Memory | None = None,
) -> None:
    """Do what set_thresholds(), take_above(), steer() and pack_sparse() do. payload: see take_topk_and_pack()."""
    words = scratch_words(extension.native, "take_above_and_pack", residual.is_cuda, residual.numel(), capacity)
    memory = memory or Memory()
    arrays = payload, memory.scratch("take", words, residual), memory.counters(residual)
    moments, ends, lam, thresholds, pooled, target = bar
    rule = (moments, ends, lam, pooled, target or 0, thresholds)
    extension.native.take_above_and_pack(residual, ages, flag, *rule, capacity, *arrays, **queue(residual))


def set_thresholds(moments: Array, ends: Array, lam: Array, thresholds: Array, *, pooled: bool = False) -> None:
    """Set the threshold of each layer to lam * sigma. pooled: of all layers as one."""
    extension.native.set_thresholds(moments, ends, lam, pooled, thresholds, **queue(lam))


def steer(lam: Array, header: Array, target: int) -> None:
    """Move lam[0] by up to the gain lam[1], so that the number of entries that pass (header) comes closer to the target."""
    extension.native.steer(lam, header, target, **queue(lam))


def add_sparse(
    target: Array, values: Array, indices: Array, header: Array, scale: float = 1.0, marks: Array | None = None
) -> None:
    """Add entries: target[indices] += scale * values. A flagged or malformed payload makes target[0] NaN.

    marks: of an update; set for the lines that are written to.
    """
    extension.native.add_sparse(target, marks, values, indices, header, scale, **queue(target))


def settle_sparse(
    residual: Array, values: Array, indices: Array, header: Array, update: Array, kept_share: float = 0.0
) -> None:
    """Put kept_share times the taken entries back if update[0] is finite, otherwise all of them."""
    extension.native.settle_sparse(residual, values, indices, header, update, kept_share, **queue(residual))


def packed_words(n: int, capacity: int) -> int:
    """Count the 32-bit words of packed entries, up to `capacity` of n: a row of high parts, and a row of codes."""
    low = min((n // capacity).bit_length() - 1, BLOCK.bit_length() - 1)
    return -(-((n - 1 >> low) + 1 + capacity) // 32) + -(-capacity * (low + VALUE_BITS) // 32)


def pack_sparse(
    values: Array, indices: Array, header: Array, n: int, blocks: Array, entries: Array, residual: Array | None = None
) -> None:
    """Pack entries of a bucket of n (csrc/wire.md). The rounding error goes back into residual, if given."""
    extension.native.pack_sparse(residual, values, indices, header, n, blocks, entries, **queue(values))


def unpack_sparse(values: Array, indices: Array, header: Array, n: int, blocks: Array, entries: Array) -> None:
    """Unpack entries into values and indices. A malformed payload sets the flag in header, which should be a copy."""
    extension.native.unpack_sparse(values, indices, header, n, blocks, entries, **queue(values))


def add_packed(
    target: Array,
    blocks: Sequence[Array],
    entries: Sequence[Array],
    headers: Sequence[Array],
    capacity: int,
    scale: float = 1.0,
    marks: Array | None = None,
) -> None:
    """Add packed entries of several ranks to the target, rank by rank, as add_sparse() does. capacity: of each payload."""
    for few in launches("add_packed", blocks=blocks, entries=entries, headers=headers):
        extension.native.add_packed(target, marks, blocks[few], entries[few], headers[few], capacity, scale, **queue(target))


def settle_packed(
    residual: Array, blocks: Array, entries: Array, header: Array, update: Array, capacity: int, kept_share: float = 0.0
) -> None:
    """Put packed entries back, as settle_sparse() does."""
    extension.native.settle_packed(residual, blocks, entries, header, update, capacity, kept_share, **queue(residual))


def add_and_settle_packed(
    update: Array,
    payloads: Sequence[Array],
    capacity: int,
    scale: float,
    marks: Array | None,
    residual: Array,
    own: Array,
    kept_share: float = 0.0,
    first: Array | None = None,
    memory: Memory | None = None,
) -> None:
    """Do what add_packed() does, for the payloads of at most MOST_RANKS ranks, and settle_packed() with the sums as the update.

    own: the payload that this rank sent. Payloads are given in bytes. first: becomes a copy of the update's first entry.
    """
    arrays = residual, own, kept_share, first, (memory or Memory()).counters(residual)
    extension.native.add_and_settle_packed(update, marks, payloads, capacity, scale, *arrays, **queue(residual))


def add_entries(target: Tensor, indices: Tensor, values: Tensor) -> None:
    """Add values at these indices. Only indices of entries that are 0 may repeat: the zeros are added at index 0.

    On a GPU, torch's index_add_ adds by atomics, which take subnormal numbers for 0.
    """
    at = torch.where(values != 0, indices, 0).int()
    header = torch.zeros(2, dtype=torch.int32, device=values.device)
    header[:1].fill_(len(values))  # torch.tensor() would copy from the host
    add_sparse(target, values, at, header)


def add_within_largest(residual: Tensor, indices: Tensor, values: Tensor) -> None:
    """Add values at these indices of a residual, within the largest magnitude. The excess of a sum is lost.

    Only indices of entries that are 0 may repeat. A value in double precision that is larger than the largest magnitude is
    added in halves.
    """
    before = residual.index_select(0, indices).double()
    added = (before + values).clamp(-LARGEST, LARGEST) - before
    first = torch.where(added.abs() > LARGEST, added / 2, added)
    for part in (first, added - first):
        add_entries(residual, indices, part.float())
