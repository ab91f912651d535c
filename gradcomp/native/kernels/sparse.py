"""Kernels of sparse entries: what is taken out of a residual, packed, added up and settled."""

from __future__ import annotations

from collections.abc import Sequence

from gradcomp.native import extension
from gradcomp.native.extension import Array, count, launches, on_cuda, queue
from gradcomp.native.memory import Memory


def take_topk(
    value: Array,
    k: int,
    values: Array,
    indices: Array,
    header: Array,
    velocity: Array | None = None,
    flag: Array | None = None,
    peaks: Array | None = None,
    memory: Memory | None = None,
) -> None:
    """Moves the k entries of largest magnitude out of value, in index order, ties to the lower index; header <- (k, flag)."""
    words = extension.native.take_topk_scratch(on_cuda(value), count(value), k)
    scratch = (memory or Memory()).scratch("topk", words, value)
    extension.native.take_topk(value, velocity, flag, peaks, k, values, indices, header, scratch, **queue(value))


def add_sparse(
    target: Array, values: Array, indices: Array, header: Array, scale: float = 1.0, marks: Array | None = None
) -> None:
    """target[indices] += scale * values; where the header is flagged or the payload malformed, target[0] becomes NaN.

    marks: of an update; they are set where something is added.
    """
    extension.native.add_sparse(target, marks, values, indices, header, scale, **queue(target))


def settle_sparse(value: Array, values: Array, indices: Array, header: Array, update: Array, keep: float = 0.0) -> None:
    """What was taken leaves keep times itself behind; all of it goes back if the update is not finite (update[0] says so)."""
    extension.native.settle_sparse(value, values, indices, header, update, keep, **queue(value))


def set_thresholds(
    moments: Array,
    ends: Array,
    lam: Array,
    centers: Array,
    thresholds: Array,
    *,
    from_zero: bool = False,
    about_mean: bool = False,
    skip_zeros: bool = True,
    live: bool = True,
    pooled: bool = False,
) -> None:
    """thresholds <- lam * sigma of each layer, centers <- what its entries are measured from; ops.inc explains the options."""
    options = (from_zero, about_mean, skip_zeros, live, pooled)
    extension.native.set_thresholds(moments, ends, lam, *options, centers, thresholds, **queue(lam))


def steer(lam: Array, header: Array, target: int) -> None:
    """Moves lam a little, so that the number of entries that pass (header) comes nearer to the target."""
    extension.native.steer(lam, header, target, **queue(lam))


def take_above(
    value: Array,
    ends: Array,
    centers: Array,
    thresholds: Array,
    values: Array,
    indices: Array,
    header: Array,
    velocity: Array | None = None,
    flag: Array | None = None,
    peaks: Array | None = None,
    memory: Memory | None = None,
) -> None:
    """Moves the entries with |value - center| above their layer's threshold out of value, in index order.

    As many as there is room for in values: the largest, if more pass. header <- (how many pass, flag).
    """
    words = extension.native.take_above_scratch(on_cuda(value), count(value), count(values))
    layers = (ends, centers, thresholds)
    scratch = (memory or Memory()).scratch("above", words, value)
    extension.native.take_above(value, velocity, flag, peaks, *layers, values, indices, header, scratch, **queue(value))


def pack_sparse(values: Array, indices: Array, header: Array, value: Array | None, blocks: Array, entries: Array) -> None:
    """Packs entries into 32 bits each (gradcomp/messages/wire.md); what that loses goes back into value, if given."""
    extension.native.pack_sparse(values, indices, header, value, blocks, entries, **queue(values))


def unpack_sparse(values: Array, indices: Array, header: Array, blocks: Array, entries: Array) -> None:
    """values, indices <- what packed entries say; a malformed payload sets the flag in header, which is to be a copy."""
    extension.native.unpack_sparse(blocks, entries, header, values, indices, **queue(values))


def add_packed(
    target: Array,
    blocks: Sequence[Array],
    entries: Sequence[Array],
    headers: Sequence[Array],
    scale: float = 1.0,
    marks: Array | None = None,
) -> None:
    """add_sparse for entries in 32 bits, of several ranks, one after the other."""
    for few in launches(len(headers)):
        extension.native.add_packed(target, marks, blocks[few], entries[few], headers[few], scale, **queue(target))


def settle_packed(value: Array, blocks: Array, entries: Array, header: Array, update: Array, keep: float = 0.0) -> None:
    """settle_sparse for entries in 32 bits."""
    extension.native.settle_packed(value, blocks, entries, header, update, keep, **queue(value))
