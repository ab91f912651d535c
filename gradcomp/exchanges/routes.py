"""The routes of sparse entries to a common update: the allgather here, the tree and the split in files of their own."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gradcomp.exchanges import split, tree
from gradcomp.exchanges.delayed_counts import Seen
from gradcomp.knobs import knob
from gradcomp.messages.sparse import CODECS, EXACT, Codec, Taken
from gradcomp.native.memory import Update
from gradcomp.protocol import Acc, Steps
from gradcomp.requests import World, gather

ROUTES = ("allgather", "tree", "split")


def route_knob() -> Any:
    """The knob that names a route."""
    return knob(
        "allgather",
        "how entries become an update: all to all; or k sums on, however many ranks, along a tree or faster by a split",
        choices=ROUTES,
    )


def codec(wire: str, route: str) -> Codec:
    """The form that entries travel in. Those that add up on their way through a tree are always exact."""
    return EXACT if route == "tree" else CODECS[wire]


def masked(acc: Acc, route: str) -> Tensor | None:
    """The velocity that a take has to mask: none in a tree, where only its end tells what went."""
    return None if route == "tree" else acc.velocity


def exchange(acc: Acc, taken: Taken, world: World, route: str, keep: float = 0.0, seen: Seen | None = None) -> Steps:
    """Exchange what all ranks took: the update is the mean of it, or of its largest part; the rest stays with somebody.

    If a rank met a gradient that is not finite, the update is not finite on all ranks and every rank takes its entries back.
    What went leaves keep times itself behind.
    """
    if route == "tree":
        return (yield from tree.sparse_sum(acc, taken.payload, world, keep=keep, seen=seen))
    if route == "split" and split.Partition(acc.residual.numel(), world.size).part_capacity(len(taken.entries.values)) > 0:
        return (yield from split.sparse_sum(acc, taken, world, keep, seen))
    return (yield from allgather(acc, taken, world, keep, seen))


def allgather(
    acc: Acc, taken: Taken, world: World, keep: float = 0.0, seen: Seen | None = None, into: Update | None = None
) -> Steps:
    """Give everybody's entries to everybody, and add them up rank by rank: the same sum, in the same order, on all ranks.

    into: zeros that become the update; None borrows one from acc's memory.
    """
    n, codec = acc.residual.numel(), taken.codec
    payload = codec.pack(taken, acc.residual)
    came = yield from gather(payload)
    update = acc.memory.lend(n, acc.residual.device) if into is None else into
    codec.add(update, came, 1 / world.size)
    codec.check(dict(enumerate(came)), update, n)
    codec.settle(acc.residual, payload, update, keep)
    if seen is not None:
        seen(came)
    return update
