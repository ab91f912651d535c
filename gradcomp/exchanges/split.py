"""A sparse sum with traffic that does not grow with the ranks: each rank adds up one part and sends on its largest sums.

S. Li, T. Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning" (PPoPP 2022), give each rank one range of the
bucket and move the ranges' borders every so often to where the entries are. Here a hash deals out runs of 64 entries, so all
parts are about equally full wherever the large entries lie.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gradcomp.core.compressor import Acc, Steps
from gradcomp.core.requests import Form, Payload, World, gather, send
from gradcomp.messages import payload as payloads
from gradcomp.messages.sparse import Codec, CountObserver, Entries, Taken, are_there
from gradcomp.native import kernels
from gradcomp.native.extension import LINE
from gradcomp.native.kernels.sparse import add_entries, add_within_largest
from gradcomp.native.memory import Memory, Update

# The capacity of a part's payload: SLACK times the mean count, plus this many standard deviations of a random count.
SLACK, DEVIATIONS = 1.1, 3


class Partition(NamedTuple):
    """A division of a bucket's n entries into one part for each rank. A cycle is one run of 64 entries for each rank."""

    n: int
    ranks: int

    @property
    def cycles(self) -> int:
        return -(-self.n // (self.ranks * LINE))

    @property
    def size(self) -> int:
        """Return the entries of a part. In the last cycle, some of them may lie beyond the bucket's end."""
        return self.cycles * LINE

    def part_capacity(self, taken: int) -> int:
        """Return the capacity of a part's payload if a rank takes this many entries: never more than the smallest part."""
        smallest = self.n // (self.ranks * LINE) * LINE
        mean = taken / self.ranks
        return min(smallest, taken, math.ceil(SLACK * mean + DEVIATIONS * math.sqrt(mean)))

    def locate(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Map indices in the bucket to the ranks that own them and to indices in their parts."""
        run = indices // LINE
        cycle = run // self.ranks
        return (run + _rotation(cycle)) % self.ranks, cycle * LINE + indices % LINE

    def indices(self, rank: int, local: Tensor) -> Tensor:
        """Map indices in a rank's part to indices in the bucket."""
        return self._runs(rank, local // LINE) * LINE + local % LINE

    def copy(self, rank: int, residual: Tensor, memory: Memory) -> Tensor:
        """Copy a rank's part of the residual into scratch, with zeros beyond the bucket's end."""
        runs, full, rest = self._runs_in_bucket(rank, residual.device)
        lines: Tensor = memory.scratch("part", self.size, residual, "float32").view(-1, LINE)
        torch.index_select(residual[:full].view(-1, LINE), 0, runs, out=lines[: len(runs)])
        lines[len(runs) :] = 0
        lines[-1, :rest] = residual[full : full + rest]
        return lines.view(-1)

    def _runs_in_bucket(self, rank: int, device: torch.device) -> tuple[Tensor, int, int]:
        """Return a rank's full runs, the entries in all full runs of the bucket, and the entries of the rank's partial run."""
        runs = self._runs(rank, torch.arange(self.cycles, device=device))
        full = self.n // LINE
        last = int(self._runs(rank, torch.tensor([self.cycles - 1])))  # only a rank's last run can lie beyond the end
        rest = self.n % LINE if last == full else 0
        return runs[: self.cycles - (last >= full)], full * LINE, rest

    def _runs(self, rank: int, cycle: Tensor) -> Tensor:
        return cycle * self.ranks + (rank - _rotation(cycle)) % self.ranks


def _rotation(cycle: Tensor) -> Tensor:
    """Hash a cycle to the offset of its first run's rank, so that regular strides in the bucket meet all ranks."""
    return (cycle * 0x9E3779B1 >> 16) & 0xFFFF


def sparse_sum(acc: Acc, taken: Taken, world: World, kept_share: float = 0.0, observe: CountObserver | None = None) -> Steps:
    """Sum the entries that all ranks took, part by part; each rank sends on as many of its part's largest sums as fit.

    An entry goes back to the rank that took it if it is beyond the capacity of its part's payload, or if its sum is not sent
    on; the ages of the others become 0. The rounding error of a sum stays with the rank that added it up. kept_share:
    this share of a sent entry stays in the residual. observe: called with the results, whose headers count the selected
    entries, or more.
    """
    n, device, codec = acc.residual.numel(), acc.residual.device, taken.codec
    parts = Partition(n, world.size)
    dealt = _deal(taken.unpacked, parts)
    capacity = dealt.values.shape[1]
    form = codec.form(parts.size, capacity)
    own = [_payload(codec, form, *entries) for entries in zip(dealt.values, dealt.local, dealt.headers, strict=True)]
    sent = torch.stack([codec.read(payload).values for payload in own])
    received = yield from send({rank: own[rank] for rank in world.others}, world.others, form, device)
    received = {**received, world.rank: own[world.rank]}
    sums = Update(torch.zeros(parts.size, device=device))
    codec.add(sums, [received[rank] for rank in sorted(received)], world.share)
    codec.check(received.items(), sums, parts.size)
    headers = torch.stack([payload["header"] for payload in received.values()])
    result, sent_on = _take_largest(codec, form, capacity, sums.flat, headers, acc.memory)
    results = yield from gather(result)
    update = acc.memory.lend(n, device)
    for rank, result in enumerate(results):
        values, local, header = codec.read(result)
        kernels.add_sparse(update.flat, values, parts.indices(rank, local).int(), header, world.mean_of_shares, update.marks)
    codec.check(enumerate(results), update, parts.size)
    failed = ~update.flat[:1].isfinite()
    arrived = (update.flat[dealt.indices] != 0) & ~failed
    returned = torch.where(arrived, dealt.values - sent + kept_share * sent, dealt.values)
    add_entries(acc.residual, dealt.indices.flatten(), returned.flatten())
    if acc.ages is not None:
        kernels.note_sent(acc.ages, dealt.indices.flatten(), (arrived & (dealt.values != 0)).flatten())
    add_entries(acc.residual, dealt.overflow_indices, dealt.overflow_values)
    indices = parts.indices(world.rank, sent_on).long().clamp(max=n - 1)  # beyond the end the update is not finite
    errors = (1 - kept_share) / world.share * sums.flat.index_select(0, sent_on).double()
    add_within_largest(acc.residual, indices, errors.masked_fill((update.flat[indices] == 0) | failed, 0.0))
    if observe is not None:
        observe(results)
    return update


class DealtEntries(NamedTuple):
    """The entries that a rank took, dealt out to the parts.

    values, indices in the bucket, local indices in the part: [ranks, capacity], 0 where unused. headers: [ranks, 2].
    overflow: the entries beyond their part's capacity; values are zero for all others.
    """

    values: Tensor
    indices: Tensor
    local: Tensor
    headers: Tensor
    overflow_values: Tensor
    overflow_indices: Tensor


def _deal(taken: Entries, parts: Partition) -> DealtEntries:
    """Deal the taken entries out to the parts, in the order of their indices."""
    count, device = taken.values.numel(), taken.values.device
    capacity, position = parts.part_capacity(count), torch.arange(count, device=device)
    there = are_there(taken.header, count)
    indices = torch.where(there, taken.indices, 0).long()
    owner, local = parts.locate(indices)
    owner, order = torch.where(there, owner, parts.ranks).sort(stable=True)
    values, indices, local = (array.index_select(0, order) for array in (taken.values, indices, local))
    begins = torch.searchsorted(owner, torch.arange(parts.ranks + 1, device=device))
    slots = begins[:-1, None] + torch.arange(capacity, device=device)
    used = slots < begins[1:, None]
    slots = slots.clamp(max=count - 1)
    overflow = (position - begins.index_select(0, owner) >= capacity) & (owner < parts.ranks)
    headers = torch.stack([begins[1:] - begins[:-1], taken.header[1].expand(parts.ranks)], 1).int()
    return DealtEntries(
        values[slots].masked_fill(~used, 0.0),
        indices[slots].masked_fill(~used, 0),
        local[slots].masked_fill(~used, 0).int(),
        headers,
        values.masked_fill(~overflow, 0.0),
        indices.masked_fill(~overflow, 0),
    )


def _take_largest(
    codec: Codec, form: Form, capacity: int, sums: Tensor, headers: Tensor, memory: Memory
) -> tuple[Payload, Tensor]:
    """Move the largest of a part's sums into a payload; the rounding error stays. Return the payload and its indices.

    headers: those of the received payloads.
    """
    device = sums.device
    values, local = torch.empty(capacity, device=device), torch.empty(capacity, dtype=torch.int32, device=device)
    header = torch.empty(2, dtype=torch.int32, device=device)
    kernels.take_topk(sums, capacity, values, local, header, memory=memory)
    header[:1] = (len(headers) * headers[:, 0].max()).clamp(min=capacity)
    header[1:] = torch.maximum(headers[:, 1].max(), ~values.isfinite().all())
    values.nan_to_num_(0.0, 0.0, 0.0)  # changes nothing unless the flag is set
    return _payload(codec, form, values, local, header, sums), local


def _payload(
    codec: Codec, form: Form, values: Tensor, local: Tensor, header: Tensor, residual: Tensor | None = None
) -> Payload:
    """Make a payload of a part's entries. The rounding error is added to the residual, if given."""
    payload = payloads.empty(form, values.device)
    payload["header"].copy_(header)
    codec.write(payload, values, local, residual)
    return payload
