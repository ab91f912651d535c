"""Steps that algorithms share: ways of bringing payloads together into one update."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from gradcomp import kernels, tree, wire
from gradcomp.core import Acc, Gather, Payload, Reduce, Send, Steps, World


class Taken(NamedTuple):
    """Room for sparse entries, which a take kernel fills: values, their places, and the header."""

    values: Tensor
    indices: Tensor
    header: Tensor
    payload: Payload

    @property
    def arrays(self) -> dict[str, Tensor]:
        return {"values": self.values, "indices": self.indices, "header": self.header}

    @property
    def packed(self) -> bool:
        """Whether it travels in 32 bits an entry."""
        return "blocks" in self.payload.arrays


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


def check_replies(replies: Mapping[int, Payload], target: Tensor, n: int) -> None:
    """Once sparse payloads for n entries were added up: on a CPU a malformed one, of which a NaN tells, gets a sentence."""
    if target.device.type == "cpu" and not math.isfinite(target[0]):
        for rank, reply in replies.items():
            wire.check_sparse(reply, n, f"rank {rank}")


def add_all(target: Tensor, payloads: Sequence[Payload], scale: float = 1.0) -> None:
    """Adds sparse payloads, one after the other."""
    if "blocks" in payloads[0].arrays:
        blocks, entries, headers = ([payload[name] for payload in payloads] for name in ("blocks", "entries", "header"))
        kernels.add_packed(target, blocks, entries, headers, scale)
        return
    for payload in payloads:
        kernels.add_sparse(target, **payload.arrays, scale=scale)


def sparse_allgather(
    acc: Acc,
    taken: Taken,
    world: World,
    keep: float = 0.0,
    seen: Callable[[Sequence[Payload]], None] = lambda came: None,
) -> Steps:
    """Everybody's entries to everybody, added up rank by rank: the same sum, in the same order, on all ranks.

    If a rank met a gradient that is not finite, the update is not finite on all ranks and every rank takes its entries back.
    Otherwise what was taken leaves keep times itself behind. seen() is shown what came.
    """
    payload, packed = taken.payload, taken.packed
    if packed:
        kernels.pack_sparse(**taken.arrays, value=acc.value, blocks=payload["blocks"], entries=payload["entries"])
    replies = yield Gather(payload)
    update = kernels.sparse_zeros(acc.value.numel(), acc.value.device)
    add_all(update, replies, 1 / world.size)
    check_replies(dict(enumerate(replies)), update, update.numel())
    (kernels.settle_packed if packed else kernels.settle_sparse)(acc.value, **payload.arrays, update=update, keep=keep)
    seen(replies)
    return update


SUMS = ("allreduce", "tree")


def sum_over_ranks(tensor: Tensor, world: World, how: str) -> Steps:
    """The sum of all ranks' tensors, to the same bits everywhere. The tensor is given away."""
    if how == "tree":
        return (yield from tree.dense_sum(tensor, world))
    total: Tensor = yield Reduce(tensor)
    return total


def sum_at_server(tensor: Tensor, world: World) -> Steps:
    """On rank 0 the sum of all ranks' tensors, added rank by rank; on the others what they sent."""
    whole, leads = wire.whole(tensor), world.rank == 0
    came = yield Send({} if leads else {0: whole}, world.others if leads else (), whole.form, tensor.device)
    for rank in sorted(came):
        tensor = tensor + came[rank]["bytes"]
    return tensor


def from_server(tensor: Tensor, world: World) -> Steps:
    """Rank 0's tensor, on all ranks."""
    whole, leads = wire.whole(tensor), world.rank == 0
    came = yield Send(dict.fromkeys(world.others, whole) if leads else {}, () if leads else (0,), whole.form, tensor.device)
    return tensor if leads else came[0]["bytes"]
