"""A sparse sum whose traffic does not grow with the ranks: each rank adds up a part of the entries, and sends the largest on.

S. Li, T. Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning" (PPoPP 2022), have parts of one range each,
whose borders they move every so often to where the entries are. Here runs of 64 entries are dealt out by a hash, so that no
part is ever much fuller than another, wherever the large entries lie.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gradcomp.exchanges.delayed_counts import Seen
from gradcomp.messages import payload as payloads
from gradcomp.messages.sparse import Codec, Entries, Taken
from gradcomp.native import kernels
from gradcomp.native.extension import LINE
from gradcomp.native.memory import Memory, Update
from gradcomp.protocol import Acc, Steps
from gradcomp.requests import Form, Payload, World, gather, send

SLACK, DEVIATIONS = 1.1, 3
"""Room for a part's entries: over the mean, and for so many deviations of a count by chance."""


class Partition(NamedTuple):
    """Who adds up which entries. Of every group of as many runs as there are ranks, each rank has one."""

    n: int
    ranks: int

    @property
    def groups(self) -> int:
        return -(-self.n // (self.ranks * LINE))

    @property
    def size(self) -> int:
        """Entries of a part; those of the last group's runs need not all be there."""
        return self.groups * LINE

    def part_capacity(self, taken: int) -> int:
        """Return the capacity of a part's payload where a rank takes this many entries: never more than the smallest part."""
        smallest = self.n // (self.ranks * LINE) * LINE
        mean = taken / self.ranks
        return min(smallest, taken, math.ceil(SLACK * mean + DEVIATIONS * math.sqrt(mean)))

    def locate(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Of entries of the bucket: whose part each is in, and where it is there."""
        run = places // LINE
        group = run // self.ranks
        return (run + _turn(group)) % self.ranks, group * LINE + places % LINE

    def places(self, rank: int, local: Tensor) -> Tensor:
        """Where in the bucket entries of a rank's part are."""
        return self._runs(rank, local // LINE) * LINE + local % LINE

    def copy(self, rank: int, residual: Tensor, memory: Memory) -> Tensor:
        """A rank's part of value, in scratch; zeros, where entries of the last group are not there."""
        runs, whole, rest = self._there(rank, residual.device)
        lines: Tensor = memory.scratch("part", self.size, residual, "float32").view(-1, LINE)
        torch.index_select(residual[:whole].view(-1, LINE), 0, runs, out=lines[: len(runs)])
        lines[len(runs) :] = 0
        lines[-1, :rest] = residual[whole : whole + rest]
        return lines.view(-1)

    def add(self, rank: int, part: Tensor, residual: Tensor) -> None:
        """residual += part, where that rank's part lies."""
        runs, whole, rest = self._there(rank, residual.device)
        lines = part.view(-1, LINE)
        residual[:whole].view(-1, LINE).index_add_(0, runs, lines[: len(runs)])
        residual[whole : whole + rest] += lines[-1, :rest]

    def _there(self, rank: int, device: torch.device) -> tuple[Tensor, int, int]:
        """A rank's runs that are there in full, how many entries the bucket's full runs have, and those of its last one if
        that is not full."""
        runs = self._runs(rank, torch.arange(self.groups, device=device))
        full = self.n // LINE
        last = int(self._runs(rank, torch.tensor([self.groups - 1])))  # of the runs only this one need not be there
        rest = self.n % LINE if last == full else 0
        return runs[: self.groups - (last >= full)], full * LINE, rest

    def _runs(self, rank: int, group: Tensor) -> Tensor:
        return group * self.ranks + (rank - _turn(group)) % self.ranks


def _turn(group: Tensor) -> Tensor:
    """By how much further on a group is dealt out; hashed, so that no stride of a matrix always meets the same rank."""
    return (group * 0x9E3779B1 >> 16) & 0xFFFF


def sparse_sum(
    acc: Acc,
    taken: Taken,
    world: World,
    keep: float = 0.0,
    seen: Seen | None = None,
) -> Steps:
    """The mean update of what all ranks took: of each part the entries of largest sums, as many as it has room for.

    What has no room on the way to its part goes back to the rank that took it; a sum that is not sent on stays with the rank
    that added it up. What went leaves keep times itself behind. seen() is shown the results, whose counts say for how many
    entries there should have been room.
    """
    n, device, codec = acc.residual.numel(), acc.residual.device, taken.codec
    parts = Partition(n, world.size)
    dealt = _deal(taken.entries, parts)
    capacity = dealt.values.shape[1]
    form = codec.form(parts.size, capacity)
    own = [_payload(codec, form, *each) for each in zip(dealt.values, dealt.local, dealt.headers, strict=True)]
    sent = torch.stack([codec.read(payload).values for payload in own])
    came = yield from send({rank: own[rank] for rank in world.others}, world.others, form, device)
    came = {**came, world.rank: own[world.rank]}
    sums = Update(torch.zeros(parts.size, device=device))
    codec.add(sums, [came[rank] for rank in sorted(came)])
    codec.check(came, sums, parts.size)
    headers = torch.stack([each["header"] for each in came.values()])
    results = yield from gather(_result(codec, form, capacity, sums.flat, headers, acc.memory))
    update = acc.memory.lend(n, device)
    for rank, result in enumerate(results):
        values, local, header = codec.read(result)
        kernels.add_sparse(update.flat, values, parts.places(rank, local).int(), header, 1 / world.size, update.marks)
    codec.check(dict(enumerate(results)), update, parts.size)
    failed = ~update.flat[:1].isfinite()
    left = torch.where(failed, dealt.values, dealt.values - sent + keep * sent)
    acc.residual.index_add_(0, dealt.places.flatten(), left.masked_fill(~dealt.there, 0.0).flatten())
    acc.residual.index_add_(0, dealt.over_places, dealt.over_values)
    parts.add(world.rank, torch.where(failed, 0.0, sums.flat * (1 - keep)), acc.residual)
    if seen is not None:
        seen(results)
    return update


class Dealt(NamedTuple):
    """What a rank took, by parts: [ranks, capacity] of each but the headers. over: what has no capacity, or zeros."""

    values: Tensor
    places: Tensor
    local: Tensor
    there: Tensor
    headers: Tensor
    over_values: Tensor
    over_places: Tensor


def _deal(taken: Entries, parts: Partition) -> Dealt:
    count, device = taken.values.numel(), taken.values.device
    capacity, at = parts.part_capacity(count), torch.arange(count, device=device)
    used = at < taken.header[0]
    places = torch.where(used, taken.indices, 0).long()
    owner, local = parts.locate(places)
    owner, order = torch.where(used, owner, parts.ranks).sort(stable=True)
    values, places, local = (each.index_select(0, order) for each in (taken.values, places, local))
    begins = torch.searchsorted(owner, torch.arange(parts.ranks + 1, device=device))
    slots = begins[:-1, None] + torch.arange(capacity, device=device)
    there = slots < begins[1:, None]
    slots = slots.clamp(max=count - 1)
    over = (at - begins.index_select(0, owner) >= capacity) & (owner < parts.ranks)
    headers = torch.stack([begins[1:] - begins[:-1], taken.header[1].expand(parts.ranks)], 1).int()
    return Dealt(
        values[slots].masked_fill(~there, 0.0),
        places[slots].masked_fill(~there, 0),
        local[slots].masked_fill(~there, 0).int(),
        there,
        headers,
        values.masked_fill(~over, 0.0),
        places.masked_fill(~over, 0),
    )


def _result(codec: Codec, form: Form, capacity: int, sums: Tensor, headers: Tensor, memory: Memory) -> Payload:
    """The largest of a part's sums, moved out of it; what rounding leaves over stays. headers: of those who sent to it."""
    device = sums.device
    values, local = torch.empty(capacity, device=device), torch.empty(capacity, dtype=torch.int32, device=device)
    header = torch.empty(2, dtype=torch.int32, device=device)
    kernels.take_topk(sums, capacity, values, local, header, memory=memory)
    header[:1] = (len(headers) * headers[:, 0].max()).clamp(min=capacity)
    header[1:] = torch.maximum(headers[:, 1].max(), ~values.isfinite().all())
    values.nan_to_num_(0.0, 0.0, 0.0)  # flagged, where there was anything to change
    return _payload(codec, form, values, local, header, sums)


def _payload(codec: Codec, form: Form, values: Tensor, local: Tensor, header: Tensor, rest: Tensor | None = None) -> Payload:
    """Entries of a part, to be sent; what rounding loses is added to rest, if given."""
    payload = payloads.empty(form, values.device)
    payload["header"].copy_(header)
    codec.write(payload, values, local, rest)
    return payload
