"""Kernels of an exchange of updates: what a step did to the weights is offered, and the mean update delivered into them."""

from __future__ import annotations

from collections.abc import Sequence

from gradcomp.native import extension
from gradcomp.native.extension import UNKNOWN_PEAK, Array, count, queue
from gradcomp.native.kernels.pieces import chunks_of, lend_scratch, part_of
from gradcomp.native.memory import Memory


def offer_progress(
    weights: Sequence[Array],
    start: Array,
    residual: Array,
    ages: Array | None,
    shares: Array,
    flag: Array,
    *,
    decays: Array | None = None,
    factor: float = 1.0,
    residual_factor: float = 1.0,
    moments: Array | None = None,
    peaks: Array | None = None,
    memory: Memory | None = None,
) -> None:
    """Offer the progress from start to the weights, and return the weights to their start.

    made = factor * (start - weights);  all = residual_factor * residual + made;  ages <- ages + 1, at most 255
    offered = shares[ages] * all + shares[256 + ages] * made
    residual <- all - offered;  weights <- start;  start <- offered

    start: a copy of the weights from before the step, in float32. ages: uint8, the steps since each entry was last sent, 0 for
    one that was sent in the step before: Mask(None, ages, 0) notes it. None: every entry's age is 1.
    shares: float32[512]. decays: float32, of each piece; decays * start is the part of its progress that factor leaves alone.
    flag: becomes 1 if an entry's progress was not finite, which counts as 0; otherwise 0.
    moments, peaks: become those of the offered entries, see accumulate().
    """
    memory = memory or Memory()
    chunks = chunks_of(weights)
    if len(chunks) > 1 and peaks is not None:  # chunks do not end where lines do
        peaks[:] = UNKNOWN_PEAK
        peaks = None
    flags = flag if len(chunks) == 1 else memory.scratch("flags", len(chunks), residual)
    for i, (part, layers, place) in enumerate(chunks):
        flat = part_of(start, place)
        extension.native.offer_progress(
            part,
            part_of(decays, layers),
            flat,
            part_of(residual, place),
            part_of(ages, place),
            shares,
            flag if len(chunks) == 1 else flags[i : i + 1],
            part_of(moments, layers),
            peaks,
            None if moments is None else lend_scratch(count(flat), part, residual, memory),
            factor,
            residual_factor,
            **queue(residual),
        )
    if len(chunks) > 1:
        flag[:] = flags.max()


def deliver_progress(
    update: Array,
    weights: Sequence[Array],
    rest: Array,
    residual: Array,
    scale: float = 1.0,
    marks: Array | None = None,
) -> None:
    """Subtract scale * update from the weights, each in its own memory and type, and add the rest to the residual.

    The error of casts to 16 bits is added to the residual, too. An update whose first entry is not finite has failed: the first
    entry of each of the weights becomes NaN.

    rest: the offer, after the compressor took entries out of it. marks: of the update, to skip its zeros and their weights.
    """
    chunks = chunks_of(weights)
    marks = marks if len(chunks) == 1 else None  # chunks do not end where lines do
    for part, _, place in chunks:
        first = update if place is None else update[:1]
        arrays = (marks, part, part_of(rest, place), part_of(residual, place))
        extension.native.deliver_progress(part_of(update, place), first, *arrays, scale, **queue(residual))
