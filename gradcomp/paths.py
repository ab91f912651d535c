"""Steps that algorithms share: ways of bringing payloads together into one update."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from gradcomp import kernels, wire
from gradcomp.core import Acc, Gather, Payload, Reduce, Request, Send, Steps, World


class Taken(NamedTuple):
    """Room for sparse entries, which a take kernel fills: values, their places, and the header."""

    values: Tensor
    indices: Tensor
    header: Tensor
    payload: Payload

    @property
    def arrays(self) -> dict[str, Tensor]:
        return {"values": self.values, "indices": self.indices, "header": self.header}


def count_of(ratio: float, n: int) -> int:
    """How many entries this share of n is: one at least."""
    return min(n, max(1, math.ceil(ratio * n)))


def check_ratio(name: str, ratio: float) -> None:
    """Refuses what is no share of the entries."""
    if not 0 < ratio <= 1:
        raise ValueError(f"{name}: ratio must lie in (0, 1], not {ratio}")


WIRES = ("compact", "exact")


def check_wire(name: str, form: str) -> None:
    """Refuses what is no form of a sparse entry on the wire."""
    if form not in WIRES:
        raise ValueError(f"{name}: wire must be 'compact' or 'exact', not {form!r}")


def room(acc: Acc, capacity: int, form: str) -> Taken:
    """Room for this many of acc's entries: in the payload itself where the wire is exact, else to be packed into it."""
    device = acc.value.device
    if form == "exact":
        payload = wire.empty(wire.sparse_form(capacity), device)
        return Taken(payload["values"], payload["indices"], payload["header"], payload)
    payload = wire.empty(wire.packed_form(acc.value.numel(), capacity), device)
    values = kernels.scratch("values", capacity, acc.value, "float32")
    return Taken(values, kernels.scratch("indices", capacity, acc.value, "int32"), payload["header"], payload)


def dense_allreduce(acc: Acc, world: World, buffer: Tensor, keep: float = 0.0, mask: bool = False) -> Steps:
    """All of it travels; unless the update is not finite, keep times itself stays. mask: all velocity starts afresh."""
    update: Tensor = yield Reduce(kernels.offer_all(acc.value, buffer, acc.flag), scale=1 / world.size)
    kernels.settle_all(acc.value, update, keep)
    if mask and acc.velocity is not None:
        kernels.settle_all(acc.velocity, update)
    return update


def sparse_allgather(
    acc: Acc, taken: Taken, world: World, keep: float = 0.0, seen: Callable[[Sequence[Payload]], None] | None = None
) -> Steps:
    """Everybody's entries to everybody, added up rank by rank: the same sum, in the same order, on all ranks.

    If a rank met a gradient that is not finite, the update is not finite on all ranks and every rank takes its entries back.
    Otherwise what was taken leaves keep times itself behind. seen() is shown what came.
    """
    payload = taken.payload
    packed = "blocks" in payload.arrays
    if packed:
        kernels.pack_sparse(**taken.arrays, value=acc.value, blocks=payload["blocks"], entries=payload["entries"])
    replies = yield Gather(payload)
    update = kernels.sparse_zeros(acc.value.numel(), acc.value.device)
    for reply in replies:
        (kernels.add_packed if packed else kernels.add_sparse)(update, **reply.arrays, scale=1 / world.size)
    if update.device.type == "cpu" and not math.isfinite(update[0]):
        for rank, reply in enumerate(replies):
            wire.check_sparse(reply, acc.value.numel(), f"rank {rank}")
    (kernels.settle_packed if packed else kernels.settle_sparse)(acc.value, **payload.arrays, update=update, keep=keep)
    if seen is not None:
        seen(replies)
    return update


SUMS = ("auto", "allreduce", "tree")


def sum_over_ranks(tensor: Tensor, world: World, how: str = "auto") -> Steps:
    """The sum of all ranks' tensors, to the same bits everywhere. The tensor is given away."""
    if how == "tree" or (how == "auto" and tree_is_faster(4 * tensor.numel(), world.size)):
        return (yield from tree_sum(tensor, world))
    total: Tensor = yield Reduce(tensor)
    return total


LATENCY, ROUND, BYTE = 50e-6, 2e-3, 8e-9
"""Seconds, for an estimate: of a ring's hop, of an operation of Horovod's from its announcement to its end, and of a byte."""


def tree_is_faster(size: int, ranks: int) -> bool:
    """A ring sends 2 (P - 1) / P of the bytes in 2 (P - 1) hops; a tree sends them whole, in 2 log2 P operations."""
    ring = ROUND + 2 * (ranks - 1) * (LATENCY + size / ranks * BYTE)
    return 2 * max(1, (ranks - 1).bit_length()) * (ROUND + size * BYTE) < ring


def levels(ranks: int) -> list[int]:
    """How far apart those are who meet on each level of a binary tree, whose root is rank 0; one level at least."""
    return [1 << level for level in range(max(1, (ranks - 1).bit_length()))]


def tree_sum(tensor: Tensor, world: World) -> Steps:
    """Up the tree, each rank adding what comes to what it has, and down again."""
    own = yield from up_the_tree(wire.whole(tensor), world, lambda a, b: wire.whole(a["bytes"] + b["bytes"]))
    total = yield from down_the_tree(own, world)
    return total["bytes"]


def up_the_tree(
    payload: Payload, world: World, join: Callable[[Payload, Payload], Payload]
) -> Generator[Request, Any, Payload]:
    """On rank 0 all ranks' payloads joined, pair by pair; on the others what they sent."""
    for apart in levels(world.size):
        sends = world.rank % (2 * apart) == apart
        came = yield Send({world.rank - apart: payload} if sends else {}, payload.form, payload.bytes.device)
        for other in came.values():
            payload = join(payload, other)
    return payload


def down_the_tree(payload: Payload, world: World) -> Generator[Request, Any, Payload]:
    """Rank 0's payload, on all ranks."""
    for apart in reversed(levels(world.size)):
        sends = world.rank % (2 * apart) == 0 and world.rank + apart < world.size
        came = yield Send({world.rank + apart: payload} if sends else {}, payload.form, payload.bytes.device)
        payload = next(iter(came.values()), payload)
    return payload


def sum_at_server(tensor: Tensor, world: World) -> Steps:
    """On rank 0 the sum of all ranks' tensors, added rank by rank; on the others what they sent."""
    whole = wire.whole(tensor)
    came = yield Send({} if world.rank == 0 else {0: whole}, whole.form, tensor.device)
    for rank in sorted(came):
        tensor = tensor + came[rank]["bytes"]
    return tensor


def from_server(tensor: Tensor, world: World) -> Steps:
    """Rank 0's tensor, on all ranks."""
    whole = wire.whole(tensor)
    came = yield Send(dict.fromkeys(range(1, world.size), whole) if world.rank == 0 else {}, whole.form, tensor.device)
    return came[0]["bytes"] if 0 in came else tensor
