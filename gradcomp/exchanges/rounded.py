"""Two routes to the mean of rounded entries: all entries to all ranks, or each part to the rank that adds it up."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradcomp.core.compressor import Acc, Compressor, Layout, Steps
from gradcomp.core.requests import Form, Gather, Payload, Requests, World, gather, send
from gradcomp.knobs import knob
from gradcomp.messages import payload as payloads
from gradcomp.messages.rounding import Rounding
from gradcomp.native import kernels
from gradcomp.native.extension import LARGEST
from gradcomp.native.memory import Update
from gradcomp.saved import read_int

ROUTES = ("auto", "allgather", "alltoall")

# Rough estimates: seconds of one Horovod operation, and of one byte on a link of 1 Gbit/s.
SECONDS_PER_OPERATION, SECONDS_PER_BYTE = 2e-3, 8e-9


def route_knob() -> Any:
    """Declare the knob that names a route."""
    return knob(
        "auto",
        "allgather: rounds once; alltoall: twice, traffic does not grow with ranks; auto: by estimated time and error",
        choices=ROUTES,
    )


class Rounded(Compressor):
    """Base of compressors that send every entry, rounded.

    group: entries that belong together, in one part. route: a knob, of route_knob().
    """

    group: int
    route: str

    @abstractmethod
    def rounding(self, n: int) -> Rounding:
        """Return the way to round n entries."""

    @property
    @abstractmethod
    def may_round_twice(self) -> bool:
        """True if a second rounding, of sums, does no harm."""

    def bounds(self, acc: Acc, state: Any) -> Tensor | None:
        """Return the bounds at which entries are clipped, two for each group, or None."""
        return None

    def bounds_of_sums(self, sums: Tensor, state: Any) -> Tensor | None:
        """Return the bounds at which the sums of a part are clipped, or None."""
        return None

    def init(self, layout: Layout, seed: int) -> RoundedState:
        return RoundedState(seed)

    def save(self, state: RoundedState) -> dict[str, Any]:
        return {"steps": state.steps}

    def load(self, state: RoundedState, saved: Mapping[str, Any]) -> None:
        state.steps = read_int(saved, "steps")

    save_shared, load_shared = save, load  # all ranks share all of it

    def exchange(self, acc: Acc, state: RoundedState, world: World) -> Steps:
        state.steps += 1
        bounds = self.bounds(acc, state)
        n, size = acc.residual.numel(), world.size
        if state.planned_for != (n, size):
            state.planned_for, state.rounding = (n, size), self.rounding(n)
            state.by_parts = self.route_of(n, size) == "alltoall"
        rounding: Rounding = state.rounding
        if state.by_parts:
            return (yield from self._by_parts(acc, state, world, GroupPartition(n, self.group, size), bounds))
        taken = rounding.take(acc.residual, bounds, acc.flag, state.key(world.rank, 0), memory=acc.memory)
        if acc.frozen:
            _name_frozen(taken, acc)
        received: Any = yield Gather(taken)
        update = state.zeros(acc.residual)
        rounding.add_and_settle(update, received, 1 / size, acc.residual, taken, acc.memory)
        if acc.frozen:
            _leave_frozen(update, acc, received)
        return Update(update)

    def _by_parts(self, acc: Acc, state: RoundedState, world: World, parts: GroupPartition, bounds: Tensor | None) -> Steps:
        """Add up one part on each rank, and round the sums. A rank without a part sends an empty payload.

        A rank adds its own entries unrounded. The rounding error of its sums stays in its residual.
        """
        own = parts.part_of(acc.residual, world.rank)
        sums, rounding = own * world.share, self.rounding(len(own))
        sent, received = yield from self._sum_own_part(acc, state, world, parts, bounds, sums)
        flag = acc.flag  # without one, sums say themselves that they overflow
        if flag is not None:
            flag = torch.stack([flag, *(payload["header"][1:] for payload in received.values())]).amax(0)
        taken, key = payloads.empty(self._form(parts), own.device), state.key(world.rank, 0)
        if len(sums):
            rounding.take(sums, self.bounds_of_sums(sums, state), flag, key, taken, acc.memory)
        else:
            taken.bytes.zero_()
        _name_frozen(taken, acc, received.values())
        results = yield from gather(taken)
        update = state.zeros(acc.residual)
        for rank in parts.owners:
            result, part, rounding = results[rank], parts.part_of(update, rank), self.rounding(parts.length(rank))
            if rank in sent:
                residual = parts.part_of(acc.residual, rank)
                rounding.add_and_settle(part, [result], world.mean_of_shares, residual, sent[rank], acc.memory)
            else:
                rounding.add(part, [result], world.mean_of_shares)
        left = sums.div_(world.share).clamp_(-LARGEST, LARGEST)
        own.copy_(torch.where(parts.part_of(update, world.rank)[:1].isfinite(), left, own))
        _leave_frozen(update, acc, results)
        return Update(update)

    def reduce_scatter(self, acc: Acc, state: Any, world: World) -> Requests[Tensor]:
        """Exchange entries so that each rank gets the sums of its own part, and nothing of the others. Nothing stays.

        acc: of one part for each rank. All have the same number of whole groups. The sums are shares: world.mean_of_shares
        times them is the mean. A part whose entries are not finite on some rank has sums that are not finite.
        """
        n = acc.residual.numel()
        parts = GroupPartition(n, self.group, world.size)
        bounds = [self.bounds_of_sums(parts.part_of(acc.residual, rank), state) for rank in range(world.size)]
        joined = None if bounds[0] is None else torch.cat([each for each in bounds if each is not None])
        sums = parts.part_of(acc.residual, world.rank).mul_(world.share)
        yield from self._sum_own_part(acc, state, world, parts, joined, sums)
        return sums

    def _sum_own_part(
        self, acc: Acc, state: Any, world: World, parts: GroupPartition, bounds: Tensor | None, sums: Tensor
    ) -> Requests[tuple[dict[int, Payload], dict[int, Payload]]]:
        """Send the other ranks their parts, and add theirs to the share of the own one. Return payloads sent and received."""
        own, form = parts.part_of(acc.residual, world.rank), self._form(parts)
        sent = {}
        for rank in parts.owners:
            if rank == world.rank:
                continue
            part_bounds = None if bounds is None else parts.bounds_of(bounds, rank)
            payload, key = payloads.empty(form, own.device), state.key(world.rank, 1 + rank)
            part = parts.part_of(acc.residual, rank)
            sent[rank] = self.rounding(len(part)).take(part, part_bounds, acc.flag, key, payload, acc.memory)
            _name_frozen(payload, acc)
        received = yield from send(sent, world.others if len(own) else [], form, own.device)
        if len(own):
            self.rounding(len(own)).add(sums, [received[rank] for rank in sorted(received)], world.share)
        return sent, received

    def _form(self, parts: GroupPartition) -> Form:
        """Return the form of all parts' payloads: that of the largest."""
        return self.rounding(parts.longest).form

    def route_of(self, n: int, ranks: int) -> str:
        """Name the route of n entries: for auto, all to all where this is estimated to be faster, and does no harm."""
        if self.route != "auto":
            return self.route
        parts = GroupPartition(n, self.group, ranks)
        return "alltoall" if self.may_round_twice and self._seconds_saved(parts) > SECONDS_PER_OPERATION else "allgather"

    def _seconds_saved(self, parts: GroupPartition) -> float:
        """Estimate the time on the link that route=alltoall saves, for one operation more.

        A gather sends a payload P - 1 times. By parts, a rank receives its own P - 1 times, and sends its sums as often.
        """
        whole, part = payloads.size(self.rounding(parts.n).form), payloads.size(self._form(parts))
        return (parts.ranks - 1) * (whole - 2 * part) * SECONDS_PER_BYTE


def _name_frozen(payload: Payload, acc: Acc, received: Collection[Payload] = ()) -> None:
    """Write the number of this rank's frozen entries into a payload's header, unless one that was received has another."""
    if acc.frozen:
        payload["header"][:1] = acc.frozen_number * _agree(acc, received)


def _leave_frozen(update: Tensor, acc: Acc, received: Sequence[Payload]) -> None:
    """Leave the entries alone that all ranks have frozen. Most levels round their zeros to something.

    An update that is not finite stays so.
    """
    if acc.frozen:
        differ = ~_agree(acc, received)
        for begin, end in acc.frozen:
            update[begin:end].mul_(differ)
            acc.residual[begin:end].mul_(differ)


def _agree(acc: Acc, payloads: Collection[Payload]) -> Tensor:
    """Decide on the device whether the senders of payloads have frozen the entries that this rank has."""
    own = torch.full((), acc.frozen_number, dtype=torch.int32, device=acc.residual.device)
    agree = (torch.stack([own, *(payload["header"][0] for payload in payloads)]) == own).all()
    return agree if acc.agreed is None else agree & acc.agreed


class RoundedState:
    """A bucket's state between steps: the number of steps, which seeds the random rounding, and memory for the update.

    rounding, by_parts: what planned_for, a number of entries and of ranks, has been planned with.
    """

    def __init__(self, seed: int):
        self.seed, self.steps = seed, 0
        self.planned_for = (-1, -1)
        self.rounding: Any = None
        self.by_parts = False
        self.update: Tensor | None = None

    def key(self, rank: int, part: int) -> int:
        """Return the key of the random rounding. It differs for each seed, rank, step and part."""
        return (self.seed * 1_000_003 + self.steps & 0x7FFFFFFF) << 32 | (rank * 0x9E3779B1 + part & 0xFFFFFFFF)

    def zeros(self, like: Tensor) -> Tensor:
        """Return the update's memory, zeroed."""
        if self.update is None:
            self.update = torch.zeros_like(like)
        return self.update.zero_()


@dataclass(frozen=True)
class GroupPartition:
    """A division of a bucket's n entries into one part for each rank. A part consists of whole groups.

    Parts differ by at most one group. With fewer groups than ranks, some are empty.
    """

    n: int
    group: int
    ranks: int

    @property
    def groups(self) -> int:
        return kernels.groups(self.n, self.group)

    @property
    def longest(self) -> int:
        """Return the entries of the longest part: the last one, whose last group may be shorter or longer, or one before."""
        if self.ranks == 1:
            return self.n
        before = -(-self.groups // self.ranks) - (self.groups % self.ranks == 1)  # of one group more, the last part has it
        return max(self.length(self.ranks - 1), before * self.group)

    @property
    def owners(self) -> Sequence[int]:
        """List the ranks whose parts are not empty."""
        return range(self.ranks) if self.groups >= self.ranks else [rank for rank in range(self.ranks) if self.length(rank)]

    def first(self, rank: int) -> int:
        return self.n if rank == self.ranks else self.groups * rank // self.ranks * self.group

    def length(self, rank: int) -> int:
        return self.first(rank + 1) - self.first(rank)

    def part_of(self, flat: Tensor, rank: int) -> Tensor:
        return flat[self.first(rank) : self.first(rank + 1)]

    def bounds_of(self, bounds: Tensor, rank: int) -> Tensor:
        """Return the bounds of the groups in a rank's part."""
        first = self.first(rank) // self.group
        return bounds[2 * first : 2 * (first + kernels.groups(self.length(rank), self.group))]
