"""Binary trees over any number of ranks, with rank 0 as root; and sparse sums that meet in one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradcomp.exchanges.delayed_counts import Seen
from gradcomp.messages import payload as payloads
from gradcomp.native import kernels
from gradcomp.native.memory import Memory
from gradcomp.protocol import Acc, Steps
from gradcomp.requests import Asking, Payload, World, send


def levels(ranks: int) -> list[int]:
    """How far apart those are who meet on each level; one level at least."""
    return [1 << level for level in range(max(1, (ranks - 1).bit_length()))]


def _pairs(world: World, apart: int) -> tuple[list[int], list[int]]:
    """Whom this rank meets on a level: above it, or below it, or nobody."""
    place = world.rank % (2 * apart)
    above = [world.rank - apart] if place == apart else []
    return above, [world.rank + apart] if place == 0 and world.rank + apart < world.size else []


def up(payload: Payload, world: World, join: Callable[[Payload, Payload], Payload]) -> Asking[Payload]:
    """On rank 0 all ranks' payloads joined, pair by pair; on the others what they sent."""
    for apart in levels(world.size):
        upper, lower = _pairs(world, apart)
        came = yield from send(dict.fromkeys(upper, payload), lower, payload.form, payload.bytes.device)
        for other in came.values():
            payload = join(payload, other)
    return payload


def down(payload: Payload, world: World) -> Asking[Payload]:
    """Rank 0's payload, on all ranks."""
    for apart in reversed(levels(world.size)):
        upper, lower = _pairs(world, apart)
        came = yield from send(dict.fromkeys(lower, payload), upper, payload.form, payload.bytes.device)
        payload = next(iter(came.values()), payload)
    return payload


def dense_sum(tensor: Tensor, world: World) -> Asking[Tensor]:
    """The sum of all ranks' tensors, to the same bits everywhere."""
    own = yield from up(payloads.whole(tensor), world, lambda a, b: payloads.whole(a["bytes"] + b["bytes"]))
    total = yield from down(own, world)
    return total["bytes"]


Dropped = tuple[Tensor, Tensor]
"""Values that a meeting dropped and their places, in order; a place may come twice, with a value of 0."""


def sparse_sum(
    acc: Acc,
    own: Payload,
    world: World,
    *,
    keep: float = 0.0,
    faithful: bool = False,
    seen: Seen | None = None,
) -> Steps:
    """The mean update of what all ranks took (own: wire=exact), of which each meeting lets go on what there is room for.

    What does not come out of the tree goes back to those who took it. A partial sum that a meeting dropped of an entry that
    does come out, on another way, stays with the rank that dropped it (faithful: it is lost, as published). Velocity is masked
    where something went; what went leaves keep times itself behind. seen() is shown the result.
    """
    n = acc.residual.numel()
    dropped: list[Dropped] = []

    def join(ours: Payload, theirs: Payload) -> Payload:
        met, left = meet(ours, theirs, acc.memory)
        dropped.append(left)
        return met

    fill(own, n)
    result = yield from up(own, world, join)
    result = yield from down(result, world)
    update = acc.memory.lend(n, acc.residual.device)
    kernels.add_sparse(update.flat, result["values"], result["indices"], counted(result, n), 1 / world.size, update.marks)
    _settle(acc, own, [] if faithful else dropped, result, update.flat, keep)
    if seen is not None:
        seen([result])
    return update


def fill(payload: Payload, n: int) -> None:
    """Entries that nothing was taken for get a value of 0 and places behind the n there are: in order, and each its own."""
    at = torch.arange(len(payload["values"]), dtype=torch.int32, device=payload.bytes.device)
    unused = at >= payload["header"][0]
    payload["values"].masked_fill_(unused, 0.0)
    payload["indices"].copy_(torch.where(unused, n + at, payload["indices"]))


def counted(payload: Payload, n: int) -> Tensor:
    """The payload's header, with the number of places below n for a count."""
    header = payload["header"].clone()
    header[0] = (payload["indices"] < n).sum()
    return header


def meet(ours: Payload, theirs: Payload, memory: Memory | None = None) -> tuple[Payload, Dropped]:
    """The largest of the sums, as many as either has, ties to the lower place; and the sums that are left."""
    k = len(ours["values"])
    indices, order = torch.cat([ours["indices"], theirs["indices"]]).sort(stable=True)
    values = torch.cat([ours["values"], theirs["values"]]).index_select(0, order)
    again = torch.zeros_like(indices, dtype=torch.bool)
    again[1:] = indices[1:] == indices[:-1]  # a place comes twice at most
    sums = values.masked_fill(again, 0.0)
    sums[:-1] += values[1:].masked_fill(~again[1:], 0.0)
    # What is compared: a magnitude's bits plus one, so that only what came again counts nothing.
    rank = ((sums.view(torch.int32) & 0x7FFFFFFF) + 1).masked_fill(again, 0).view(torch.float32)
    met = payloads.empty(ours.form, indices.device)
    places = torch.empty(k, dtype=torch.int32, device=indices.device)
    kernels.take_topk(rank, k, torch.empty_like(met["values"]), places, met["header"], memory=memory)
    torch.index_select(indices, 0, places, out=met["indices"])
    torch.index_select(sums, 0, places, out=met["values"])
    torch.maximum(ours["header"], theirs["header"], out=met["header"])
    return met, (sums.masked_fill(rank.view(torch.int32) == 0, 0.0), indices)


def is_in(places: Tensor, chosen: Tensor) -> Tensor:
    """Whether each place is among the chosen ones, which are in order."""
    at = torch.searchsorted(chosen, places).clamp_(max=len(chosen) - 1)
    return chosen.index_select(0, at) == places


def _settle(acc: Acc, own: Payload, dropped: list[Dropped], result: Payload, update: Tensor, keep: float) -> None:
    """What is not in the result goes back; so does what was dropped of an entry that is."""
    n, failed = acc.residual.numel(), ~update[:1].isfinite()
    there = own["indices"] < n
    places = own["indices"].clamp(max=n - 1).long()
    went = is_in(own["indices"], result["indices"]) & ~failed
    left = torch.where(went, keep * own["values"], own["values"])
    acc.residual.index_add_(0, places, left.masked_fill(~there, 0.0))
    if acc.velocity is not None:
        acc.velocity.index_add_(0, places, acc.velocity.index_select(0, places).masked_fill(~(went & there), 0.0), alpha=-1)
    for values, indices in dropped:
        lost = is_in(indices, result["indices"]) & (indices < n) & ~failed
        acc.residual.index_add_(0, indices.clamp(max=n - 1).long(), values.masked_fill(~lost, 0.0), alpha=1 - keep)
