"""Binary trees over any number of ranks, with rank 0 as the root; and sparse sums along a tree."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradcomp.core.compressor import Acc, Steps
from gradcomp.core.requests import Payload, Requests, World, send
from gradcomp.messages import payload as payloads
from gradcomp.messages.sparse import CountObserver, Entries, are_outside, check_indices
from gradcomp.native import kernels
from gradcomp.native.kernels.sparse import add_entries, add_within_largest
from gradcomp.native.memory import Memory


def distances(ranks: int) -> list[int]:
    """List how far apart the ranks of a pair are, for each level of the tree. A tree has at least one level."""
    return [1 << level for level in range(max(1, (ranks - 1).bit_length()))]


def _parent_and_child(world: World, distance: int) -> tuple[list[int], list[int]]:
    """Return this rank's parent and its child on a level, each a list of one rank or none. A rank has at most one of them."""
    position = world.rank % (2 * distance)
    parent = [world.rank - distance] if position == distance else []
    return parent, [world.rank + distance] if position == 0 and world.rank + distance < world.size else []


def join_at_root(payload: Payload, world: World, join: Callable[[Payload, Payload], Payload]) -> Requests[Payload]:
    """Join all ranks' payloads at rank 0, pair by pair. The other ranks get the payload that they sent."""
    for distance in distances(world.size):
        parent, child = _parent_and_child(world, distance)
        received = yield from send(dict.fromkeys(parent, payload), child, payload.form, payload.bytes.device)
        for other in received.values():
            payload = join(payload, other)
    return payload


def send_from_root(payload: Payload, world: World) -> Requests[Payload]:
    """Send rank 0's payload to all ranks."""
    for distance in reversed(distances(world.size)):
        parent, child = _parent_and_child(world, distance)
        received = yield from send(dict.fromkeys(child, payload), parent, payload.form, payload.bytes.device)
        payload = next(iter(received.values()), payload)
    return payload


# Sums that a merge dropped, and their indices in ascending order. An index may come twice, once with a sum of 0.
Dropped = tuple[Tensor, Tensor]


def sparse_sum(
    acc: Acc, taken: Payload, world: World, *, kept_share: float = 0.0, observe: CountObserver | None = None
) -> Steps:
    """Sum the entries that all ranks took along a tree; each merge sends on only as many sums as a payload holds.

    An entry that is not in the result goes back to the ranks that took it. A merge may drop a partial sum although the entry
    still reaches the result. The merging rank then keeps the sum. The ages of the entries in the result become 0.
    taken: this rank's entries, as wire=exact. kept_share: this share of a sent entry stays in the residual.
    observe: called with the result.
    """
    n, share = acc.residual.numel(), world.share
    dropped: list[Dropped] = []

    def join(first: Payload, second: Payload) -> Payload:
        merged, losers = merge_largest(first, second, acc.memory)
        dropped.append(losers)
        return merged

    pad_unused(taken, n)
    values = taken["values"].clone()
    taken["values"].mul_(share)  # from here on, sums are sums of shares
    result = yield from join_at_root(taken, world, join)
    result = yield from send_from_root(result, world)
    update = acc.memory.lend(n, acc.residual.device)
    header = header_of_used(result, n)
    check_indices(result["indices"].clamp(max=n - 1), n, "a rank")
    check_indices(taken["indices"].clamp(max=n - 1), n, "this rank")  # it has been in the network's hands
    kernels.add_sparse(update.flat, result["values"], result["indices"], header, world.mean_of_shares, update.marks)
    kept = [(sums / share, indices) for sums, indices in dropped]
    _settle(acc, Entries(values, taken["indices"], taken["header"]), kept, result, update.flat, kept_share)
    if observe is not None:
        observe([result])
    return update


def pad_unused(payload: Payload, n: int) -> None:
    """Give each unused entry the value 0 and an index of its own above the bucket's n entries, in ascending order."""
    position = torch.arange(len(payload["values"]), dtype=torch.int32, device=payload.bytes.device)
    unused = position >= payload["header"][0]
    payload["values"].masked_fill_(unused, 0.0)
    payload["indices"].copy_(torch.where(unused, n + position, payload["indices"]))


def header_of_used(payload: Payload, n: int) -> Tensor:
    """Copy the payload's header, with the number of indices inside the bucket as its count."""
    header = payload["header"].clone()
    header[0] = (payload["indices"] < n).sum()
    return header


def merge_largest(first: Payload, second: Payload, memory: Memory | None = None) -> tuple[Payload, Dropped]:
    """Add two payloads and keep the largest sums, as many as one payload holds; ties go to the lower index."""
    k = len(first["values"])
    indices, order = torch.cat([first["indices"], second["indices"]]).sort(stable=True)
    values = torch.cat([first["values"], second["values"]]).index_select(0, order)
    repeated = torch.zeros_like(indices, dtype=torch.bool)
    repeated[1:] = indices[1:] == indices[:-1]  # an index comes twice at most
    sums = values.masked_fill(repeated, 0.0)
    sums[:-1] += values[1:].masked_fill(~repeated[1:], 0.0)
    # The sort key is a magnitude's bits plus one: only a repeated index has the key 0, a sum of 0 has not.
    key = ((sums.view(torch.int32) & 0x7FFFFFFF) + 1).masked_fill(repeated, 0).view(torch.float32)
    merged = payloads.empty(first.form, indices.device)
    largest = torch.empty(k, dtype=torch.int32, device=indices.device)
    kernels.take_topk(key, k, torch.empty_like(merged["values"]), largest, merged["header"], memory=memory)
    torch.index_select(indices, 0, largest, out=merged["indices"])
    torch.index_select(sums, 0, largest, out=merged["values"])
    torch.maximum(first["header"], second["header"], out=merged["header"])
    return merged, (sums.masked_fill(key.view(torch.int32) == 0, 0.0), indices)  # the kernel set the winners' keys to 0


def is_in(indices: Tensor, chosen: Tensor) -> Tensor:
    """Return a mask of the indices that are among the chosen ones, which ascend."""
    position = torch.searchsorted(chosen, indices).clamp_(max=len(chosen) - 1)
    return chosen.index_select(0, position) == indices


def _settle(acc: Acc, taken: Entries, dropped: list[Dropped], result: Payload, update: Tensor, kept_share: float) -> None:
    """Put back the taken entries that are not in the result, and the dropped sums of entries that are in it."""
    n, failed = acc.residual.numel(), ~update[:1].isfinite()
    used = taken.indices < n
    indices = taken.indices.clamp(max=n - 1).long()
    sent = is_in(taken.indices, result["indices"]) & ~failed
    returned = torch.where(sent, kept_share * taken.values, taken.values)
    add_entries(acc.residual, indices, returned)
    if acc.ages is not None:
        kernels.note_sent(acc.ages, indices, sent & used)
    for values, indices in dropped:
        otherwise_lost = is_in(indices, result["indices"]) & ~are_outside(indices, n) & ~failed
        inside = indices.clamp(0, n - 1).long()
        returned = (1 - kept_share) * values.masked_fill(~otherwise_lost, 0.0)
        add_within_largest(acc.residual, inside, returned)
