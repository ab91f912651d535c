"""What algorithms share that round every entry to one of a few levels: their knobs, clipping, and two ways to the mean."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from gradcomp.knobs import knob
from gradcomp.messages import payload as payloads
from gradcomp.messages.levels import Rounding, Rule, error_of
from gradcomp.native import kernels
from gradcomp.native.memory import Update
from gradcomp.protocol import Acc, Compressor, Layout, Steps, Traits
from gradcomp.requests import Form, World, gather, send

ROUTES = ("auto", "allgather", "alltoall")
SCOPES = ("layer", "group")

MOST_FED_BACK = 1.2
"""Of the squares of normal entries, what rounding may leave for error feedback. Below 1 the residual stays bounded; up to here
it grows like a random walk, as errors without feedback do; well above, by a factor each step."""
MOST_ROUNDED_TWICE = 0.8
"""The same, of what is not unbiased, for route=auto to choose parts, whose sums are rounded again."""

ROUND, BYTE = 2e-3, 8e-9
"""Seconds, for an estimate: of an operation of Horovod's, and of a byte on a link of 1 Gbit/s."""


def sigmas_knob(default: float) -> Any:
    """The knob that clips entries."""
    return knob(default, "entries count as if they lay within so many standard deviations of 0; 0 = as they are", least=0)


def levels_knob(default: int, least: int = 3) -> Any:
    """The knob that says how many levels a group has."""
    known = [count for count in kernels.PER_WORD if count >= least]
    return knob(default, "levels of a group; higher = smaller errors, more bytes", choices=known)


@dataclass(frozen=True)
class Quantising(Compressor):
    """Cuts a bucket into groups, and sends for each its levels and for each entry the number of its level."""

    group: int = knob(2048, "entries that share levels; lower = smaller errors, more bytes", least=32)
    sigmas: float = sigmas_knob(0.0)
    per: str = knob("layer", "deviation that sigmas counts: the layer's or the group's", choices=SCOPES, ablation=True)
    route: str = knob(
        "auto",
        "alltoall rounds twice, and its traffic does not grow with the ranks; auto = by what is sooner",
        choices=ROUTES,
    )

    leaves_less: ClassVar[str] = "sigmas=1.5, or with more levels"

    @property
    @abstractmethod
    def rule(self) -> Rule:
        """How a group is rounded."""

    @property
    def traits(self) -> Traits:
        moments: Literal["accumulated"] | None = "accumulated" if self.sigmas and self.per == "layer" else None
        return Traits(unbiased=self.rule.drawn and self.sigmas == 0, moments=moments)

    def refuses(self, feedback: bool) -> str | None:
        if not feedback or (left := error_of(self.rule, self.sigmas)) <= MOST_FED_BACK:
            return None
        return (
            f"with error feedback, what is left would grow without end: rounding leaves {left:.1f} times the squares of what "
            f"it is given. Less is left with {self.leaves_less}"
        )

    def init(self, layout: Layout, seed: int) -> RoundedState:
        return RoundedState(layout, seed, self.group)

    def save(self, state: RoundedState) -> dict[str, Any]:
        return {"steps": state.steps}

    def load(self, state: RoundedState, saved: Mapping[str, Any]) -> None:
        state.steps = saved["steps"]

    def exchange(self, acc: Acc, state: RoundedState, world: World) -> Steps:
        state.steps += 1
        bounds = None if not self.sigmas else self._bounds(acc, state)
        whole = Rounding(self.rule, acc.residual.numel())
        if self.route == "alltoall" or (self.route == "auto" and self._prefers_parts(whole.form, world.size)):
            parts = GroupPartition(acc.residual.numel(), self.group, world.size)
            if parts.all_full:
                return (yield from self._by_parts(acc, state, world, parts, bounds))
        own = whole.take(acc.residual, bounds, acc.flag, state.key(world.rank, 0))
        replies = yield from gather(own)
        update = state.zeros(acc.residual)
        whole.add(update, replies, 1 / world.size)
        whole.settle(acc.residual, own, update)
        return Update(update)

    def _by_parts(self, acc: Acc, state: RoundedState, world: World, parts: GroupPartition, bounds: Tensor | None) -> Steps:
        """Every rank adds up a part, its own entries as they are, and rounds the sum; what that leaves over stays with it."""
        roundings = [Rounding(self.rule, parts.length(rank)) for rank in range(world.size)]
        form = max((rounding.form for rounding in roundings), key=payloads.size)
        own = parts.part_of(acc.residual, world.rank)
        sent = {}
        for rank, rounding in enumerate(roundings):
            if rank != world.rank:
                within = None if bounds is None else parts.bounds(bounds, rank)
                payload, key = payloads.empty(form, own.device), state.key(world.rank, 1 + rank)
                sent[rank] = rounding.take(parts.part_of(acc.residual, rank), within, acc.flag, key, payload)
        came = yield from send(sent, world.others, form, own.device)
        sums, mine = own.clone(), roundings[world.rank]
        mine.add(sums, [came[rank] for rank in sorted(came)], 1.0)
        flags = [payload["header"][1:] for payload in came.values()] + ([] if acc.flag is None else [acc.flag])
        flag = torch.stack(flags).amax(0) if flags else None
        limits = self._within(state.deviations(sums)) if self.sigmas else None  # layers' deviations are not those of sums
        results = yield from gather(
            mine.take(sums, limits, flag, state.key(world.rank, 0), payloads.empty(form, acc.residual.device))
        )
        update = state.zeros(acc.residual)
        for rank, result in enumerate(results):
            roundings[rank].add(parts.part_of(update, rank), [result], 1 / world.size)
            if rank in sent:
                roundings[rank].settle(parts.part_of(acc.residual, rank), sent[rank], parts.part_of(update, rank))
        own.copy_(torch.where(parts.part_of(update, world.rank)[:1].isfinite(), sums, own))
        return Update(update)

    def _prefers_parts(self, form: Form, ranks: int) -> bool:
        """A gather sends a payload P - 1 times; parts there and back are 2 (P - 1) / P of it, in two operations. But where the
        residual hardly shrinks, it would not with a second rounding."""
        sooner = (ranks - 1) * (1 - 2 / ranks) * payloads.size(form) * BYTE > ROUND
        return sooner and (self.traits.unbiased or error_of(self.rule, self.sigmas) < MOST_ROUNDED_TWICE)

    def _bounds(self, acc: Acc, state: RoundedState) -> Tensor:
        """Two for each group: no entry counts as further from 0 than so many deviations of its layer, or of the group."""
        if self.per == "group":
            return self._within(state.deviations(acc.residual))
        assert acc.moments is not None
        of_layers = (acc.moments[:, 1] / state.sizes).clamp(min=0).sqrt().float()
        deviations = torch.zeros(state.groups, device=acc.residual.device)
        deviations.scatter_reduce_(0, state.touched, of_layers[state.touching], "amax")
        return self._within(deviations)

    def _within(self, deviations: Tensor) -> Tensor:
        most = self.sigmas * deviations
        return torch.stack([-most, most], 1).flatten()


class RoundedState:
    """What is kept of a bucket between steps: how many there were, for the draws, and room for the update."""

    def __init__(self, layout: Layout, seed: int, group: int):
        self.seed, self.steps, self.group = seed, 0, group
        self.groups = kernels.groups(layout.total, group)
        self.sizes = torch.tensor(layout.sizes, dtype=torch.float64, device=layout.device).clamp(min=1)
        pairs = [
            (number, layer)
            for layer, (begin, end) in enumerate(layout.spans)
            for number in range(min(begin // group, self.groups - 1), min(max(end - 1, begin) // group, self.groups - 1) + 1)
        ]
        self.touched, self.touching = torch.tensor(pairs, device=layout.device).T.contiguous()
        self.update: Tensor | None = None

    def key(self, rank: int, part: int) -> int:
        """What decides the draws: another one for each seed, rank, step and part."""
        return (self.seed * 1_000_003 + self.steps & 0x7FFFFFFF) << 32 | (rank * 0x9E3779B1 + part & 0xFFFFFFFF)

    def zeros(self, like: Tensor) -> Tensor:
        if self.update is None:
            self.update = torch.zeros_like(like)
        return self.update.zero_()

    def deviations(self, residual: Tensor) -> Tensor:
        """Each group's; of the bucket, or a part of it."""
        whole = (kernels.groups(residual.numel(), self.group) - 1) * self.group
        last = residual[whole:].std(0, correction=0, keepdim=True)
        return torch.cat([residual[:whole].view(-1, self.group).std(1, correction=0), last]) if whole else last


@dataclass(frozen=True)
class GroupPartition:
    """Parts of n entries, of whole groups, one for each rank; the last ones are shorter, or empty."""

    n: int
    group: int
    ranks: int

    @property
    def size(self) -> int:
        return -(-kernels.groups(self.n, self.group) // self.ranks) * self.group

    @property
    def all_full(self) -> bool:
        """Whether every rank has a group."""
        return self.first(self.ranks - 1) < kernels.groups(self.n, self.group) * self.group

    def first(self, rank: int) -> int:
        return rank * self.size

    def length(self, rank: int) -> int:
        return self._end(rank) - self.first(rank)

    def part_of(self, flat: Tensor, rank: int) -> Tensor:
        return flat[self.first(rank) : self._end(rank)]

    def bounds(self, bounds: Tensor, rank: int) -> Tensor:
        first = self.first(rank) // self.group
        return bounds[2 * first : 2 * (first + kernels.groups(self.length(rank), self.group))]

    def _end(self, rank: int) -> int:
        return self.n if rank == self.ranks - 1 else min(self.n, self.first(rank + 1))
