"""Kernels of an exchange of updates: what a step did to the weights is offered, and the mean update delivered into them."""

from __future__ import annotations

from collections.abc import Sequence

from gradcomp.native import extension
from gradcomp.native.extension import MOST_PIECES, Array, queue
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
    memory: Memory | None = None,
) -> None:
    """Offer the progress from start to the weights, and return the weights to their start.

    made = factor * (start - weights);  all = residual_factor * residual + made;  ages <- ages + 1, at most 255
    offered = shares[ages] * all + shares[256 + ages] * made
    residual <- all - offered;  weights <- start;  start <- offered

    start: a copy of the weights from before the step, in float32. ages: uint8, the steps since each entry was last sent, 0 for
    one that was sent in the step before. None: every entry's age is 1.
    shares: float32[512]. decays: float32, of each piece; decays * start is the part of its progress that factor leaves alone.
    flag: becomes 1 if an entry's progress was not finite, which counts as 0; otherwise 0.
    moments: become those of the offered entries, see collect().
    """
    if len(weights) <= MOST_PIECES:
        scratch = None if moments is None else lend_scratch(start.numel(), weights, residual, memory or Memory())
        arrays = (weights, decays, start, residual, ages, shares, flag, moments, scratch)
        extension.native.offer_progress(*arrays, factor, residual_factor, **queue(residual))
        return
    memory = memory or Memory()
    chunks = chunks_of(weights)
    flags = memory.scratch("flags", len(chunks), residual)
    for i, (part, layers, place) in enumerate(chunks):
        flat = part_of(start, place)
        extension.native.offer_progress(
            part,
            part_of(decays, layers),
            flat,
            part_of(residual, place),
            part_of(ages, place),
            shares,
            flags[i : i + 1],
            part_of(moments, layers),
            None if moments is None else lend_scratch(flat.numel(), part, residual, memory),
            factor,
            residual_factor,
            **queue(residual),
        )
    flag[:] = flags.max()


def deliver_progress(
    update: Array,
    weights: Sequence[Array],
    rest: Array,
    residual: Array,
    scale: float = 1.0,
    marks: Array | None = None,
    first: Array | None = None,
) -> bool:
    """Subtract scale * update from the weights, each in its own memory and type, and add the rest to the residual.

    Return whether the update was wiped. first: see spread().

    The error of casts to 16 bits is added to the residual, too. An update whose first entry is not finite has failed: the first
    entry of each of the weights becomes NaN.

    rest: the offer, after the compressor took entries out of it. marks: of the update, to skip its zeros and their weights.
    """
    if len(weights) <= MOST_PIECES:
        wipes, start = marks is not None and first is not None, update if first is None else first
        extension.native.deliver_progress(update, start, marks, weights, rest, residual, scale, wipes, **queue(residual))
        return wipes
    for part, _, place in chunks_of(weights):  # chunks do not end where lines of marks do
        arrays = (None, part, part_of(rest, place), part_of(residual, place))
        extension.native.deliver_progress(part_of(update, place), update[:1], *arrays, scale, False, **queue(residual))
    return False
