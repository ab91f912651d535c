"""The routes from a residual to a common update: all entries in one reduction, or sparse entries to all ranks.

tree.py and split.py hold the routes that send on the largest sums only.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gradcomp.core.compressor import Acc, Steps
from gradcomp.core.requests import Gather, World, reduce
from gradcomp.exchanges import split, tree
from gradcomp.knobs import knob
from gradcomp.messages.sparse import CODECS, EXACT, Codec, CountObserver, Taken
from gradcomp.native import kernels
from gradcomp.native.kernels import Bar
from gradcomp.native.memory import Update

ROUTES = ("allgather", "tree", "split")


def route_knob() -> Any:
    """Declare the knob that names a route."""
    return knob(
        "allgather",
        "allgather: all entries to all ranks; tree, split: the largest sums; tree ignores wire, split has fewer rounds",
        choices=ROUTES,
    )


def possible(route: str, acc: Acc, capacity: int, world: World) -> str:
    """Return the route of so many entries: split becomes allgather where a part has space for no entry."""
    has_parts = route != "split" or split.Partition(acc.residual.numel(), world.size).part_capacity(capacity) > 0
    return route if has_parts else "allgather"


def codec_of(wire: str, route: str) -> Codec:
    """Return the codec that entries travel in. A tree adds entries up on their way, so its codec is exact."""
    return EXACT if route == "tree" else CODECS[wire]


def take(acc: Acc, k: int, wire: str, route: str) -> Taken:
    """Move the k largest entries out of acc, for exchange()."""
    return codec_of(wire, route).take(acc, k, _ages_of(acc, route), packs=route == "allgather")


def take_above(acc: Acc, capacity: int, bar: Bar, wire: str, route: str) -> Taken:
    """Move the entries above the bar out of acc, at most `capacity`, for exchange()."""
    return codec_of(wire, route).take_above(acc, capacity, bar, _ages_of(acc, route), packs=route == "allgather")


def _ages_of(acc: Acc, route: str) -> Tensor | None:
    """Return the ages for a take. Where only the largest sums are sent on, ages are written when these are known."""
    return acc.ages if route == "allgather" else None


def exchange(
    acc: Acc, taken: Taken, world: World, route: str, kept_share: float = 0.0, observe: CountObserver | None = None
) -> Steps:
    """Exchange the entries that all ranks took. The update is their mean, or the mean's largest part.

    Entries that are not in the update stay with some rank. The update is not finite on any rank, and every rank takes its
    entries back, if any gradient is not finite. route: a possible() one. kept_share: this share of a sent entry stays in the
    residual. observe: called with the payloads that hold the counts.
    """
    if route == "tree":
        return (yield from tree.sparse_sum(acc, taken.payload, world, kept_share=kept_share, observe=observe))
    if route == "split":
        return (yield from split.sparse_sum(acc, taken, world, kept_share, observe))
    return (yield from allgather(acc, taken, world, kept_share, observe))


def allgather(
    acc: Acc,
    taken: Taken,
    world: World,
    kept_share: float = 0.0,
    observe: CountObserver | None = None,
    into: Update | None = None,
) -> Steps:
    """Send all entries to all ranks. Every rank adds them up in rank order, so the sums agree to the last bit.

    into: zeros that become the update; None = borrow an update from acc's memory.
    """
    n, codec = acc.residual.numel(), taken.codec
    payload = codec.pack(taken, acc.residual)
    received: Any = yield Gather(payload)
    update = acc.memory.lend(n, acc.residual.device) if into is None else into
    codec.add_and_settle(update, received, acc, payload, kept_share)
    codec.check(enumerate(received), update, n)
    if observe is not None:
        observe(received)
    return update


def send_all(acc: Acc, world: World, buffer: Tensor, kept_share: float = 0.0) -> Steps:
    """Send all entries of acc. All entries stay if the update is not finite.

    buffer: as long as the bucket; it becomes the update. kept_share: this share of a sent entry stays.
    """
    offered = kernels.offer_all(acc.residual, buffer, acc.flag, world.share)
    update = yield from reduce(offered, world.mean_of_shares)
    kernels.settle_all(acc.residual, update, kept_share)
    if acc.ages is not None:
        acc.ages.masked_fill_(update[:1].isfinite(), 0)
    return Update(update)
