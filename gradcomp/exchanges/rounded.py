"""The base of algorithms that round each entry to one of a few levels: their knobs, clipping, and two routes to the mean."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from gradcomp.knobs import knob
from gradcomp.messages import payload as payloads
from gradcomp.messages.levels import Rounding, RoundingRule, rounding_error
from gradcomp.native import kernels
from gradcomp.native.extension import LARGEST
from gradcomp.native.memory import Update
from gradcomp.protocol import Acc, Compressor, Layout, Steps, Traits
from gradcomp.requests import Form, World, gather, send
from gradcomp.saved import whole

ROUTES = ("auto", "allgather", "alltoall")
SCOPES = ("layer", "group")

# The largest rounding error with which error feedback is allowed, as a share of the squares of normal entries. Below 1 the
# residual stays bounded. Between 1 and this limit it grows like a random walk, as errors without feedback do. Well above this
# limit it grows by a factor each step.
LARGEST_ERROR_FED_BACK = 1.2
# The largest rounding error with which route=auto chooses alltoall for a biased compressor: alltoall rounds the sums again.
LARGEST_ERROR_ROUNDED_TWICE = 0.8

# A deviation above which entries are not clipped. Squares overflow a little above it.
LARGEST_DEVIATION = 2.0**56

# Rough estimates: seconds of one Horovod operation, and of one byte on a link of 1 Gbit/s.
SECONDS_PER_OPERATION, SECONDS_PER_BYTE = 2e-3, 8e-9


def sigmas_knob(default: float) -> Any:
    """Declare the knob that clips entries."""
    return knob(default, "standard deviations from 0 at which entries are clipped; 0 = no clipping", least=0)


def levels_knob(default: int, least: int = 3) -> Any:
    """Declare the knob for the number of levels."""
    counts = [count for count in kernels.PER_WORD if count >= least]
    return knob(default, "levels of a group; higher = smaller errors, more bytes", choices=counts)


@dataclass(frozen=True)
class Quantiser(Compressor):
    """Base of compressors that send each group's levels, and for each entry the number of its level."""

    group: int = knob(2048, "entries that share levels; lower = smaller errors, more bytes", least=32, most=2**31 - 1)
    sigmas: float = sigmas_knob(0.0)
    per: str = knob("layer", "scope of the standard deviation that sigmas multiplies", choices=SCOPES, ablation=True)
    route: str = knob(
        "auto",
        "allgather: rounds once; alltoall: twice, traffic does not grow with ranks; auto: by estimated time and error",
        choices=ROUTES,
    )

    # A setting that reduces the rounding error, for an error message.
    remedy: ClassVar[str] = "sigmas=1.5"

    @property
    @abstractmethod
    def rule(self) -> RoundingRule:
        """Return the rule by which a group is rounded."""

    @property
    def traits(self) -> Traits:
        moments: Literal["accumulated"] | None = "accumulated" if self.sigmas and self.per == "layer" else None
        return Traits(fed_back=not self.rule.stochastic, moments=moments)

    @property
    def unbiased(self) -> bool:
        """True if the mean of what a group may be rounded to is the group."""
        return self.rule.stochastic and self.sigmas == 0

    def refuses(self, feedback: bool) -> str | None:
        if not feedback or (error := rounding_error(self.rule, self.sigmas)) <= LARGEST_ERROR_FED_BACK:
            return None
        alternative = " or more levels" if hasattr(self, "levels") else ""
        return (
            f"with error feedback the residual would grow without end, since rounding leaves {error:.1f} times the squares "
            f"of the entries; set {self.remedy}{alternative}"
        )

    def init(self, layout: Layout, seed: int) -> RoundedState:
        return RoundedState(layout, seed, self.group)

    def save(self, state: RoundedState) -> dict[str, Any]:
        return {"steps": state.steps}

    def load(self, state: RoundedState, saved: Mapping[str, Any]) -> None:
        state.steps = whole(saved, "steps")

    save_shared, load_shared = save, load  # all ranks share all of it

    def exchange(self, acc: Acc, state: RoundedState, world: World) -> Steps:
        state.steps += 1
        bounds = self._bounds(acc, state) if self.sigmas else None
        rounding = Rounding(self.rule, acc.residual.numel())
        if self.route == "alltoall" or (self.route == "auto" and self._prefers_parts(rounding.form, world.size)):
            parts = GroupPartition(acc.residual.numel(), self.group, world.size)
            if parts.none_empty:
                return (yield from self._by_parts(acc, state, world, parts, bounds))
        taken = rounding.take(acc.residual, bounds, acc.flag, state.key(world.rank, 0))
        received = yield from gather(taken)
        update = state.zeros(acc.residual)
        rounding.add(update, received, 1 / world.size)
        rounding.settle(acc.residual, taken, update)
        return Update(update)

    def _by_parts(self, acc: Acc, state: RoundedState, world: World, parts: GroupPartition, bounds: Tensor | None) -> Steps:
        """Add up one part on each rank, and round the sums.

        A rank adds its own entries unrounded. The rounding error of its sums stays in its residual.
        """
        roundings = [Rounding(self.rule, parts.length(rank)) for rank in range(world.size)]
        form = max((rounding.form for rounding in roundings), key=payloads.size)
        own = parts.part_of(acc.residual, world.rank)
        sent = {}
        for rank in world.others:
            part_bounds = None if bounds is None else parts.bounds_of(bounds, rank)
            payload, key = payloads.empty(form, own.device), state.key(world.rank, 1 + rank)
            sent[rank] = roundings[rank].take(parts.part_of(acc.residual, rank), part_bounds, acc.flag, key, payload)
        received = yield from send(sent, world.others, form, own.device)
        sums, rounding = own * world.share, roundings[world.rank]
        rounding.add(sums, [received[rank] for rank in sorted(received)], world.share)
        flags = [payload["header"][1:] for payload in received.values()] + ([] if acc.flag is None else [acc.flag])
        flag = torch.stack(flags).amax(0) if flags else None
        sum_bounds = self._clip(state.deviations(sums)) if self.sigmas else None  # the layers' deviations are not the sums'
        payload = payloads.empty(form, own.device)
        results = yield from gather(rounding.take(sums, sum_bounds, flag, state.key(world.rank, 0), payload))
        update = state.zeros(acc.residual)
        for rank, result in enumerate(results):
            roundings[rank].add(parts.part_of(update, rank), [result], world.mean_of_shares)
            if rank in sent:
                roundings[rank].settle(parts.part_of(acc.residual, rank), sent[rank], parts.part_of(update, rank))
        left = sums.div_(world.share).clamp_(-LARGEST, LARGEST)
        own.copy_(torch.where(parts.part_of(update, world.rank)[:1].isfinite(), left, own))
        return Update(update)

    def _prefers_parts(self, form: Form, ranks: int) -> bool:
        """Estimate whether route=alltoall is faster, and return False if its second rounding would do harm.

        A gather sends a payload P - 1 times. The parts, there and back, are 2 (P - 1) / P payloads, in two operations. A second
        rounding would stop the residual from shrinking if one rounding hardly shrinks it.
        """
        saved = (ranks - 1) * (1 - 2 / ranks) * payloads.size(form) * SECONDS_PER_BYTE
        harmless = self.unbiased or rounding_error(self.rule, self.sigmas) < LARGEST_ERROR_ROUNDED_TWICE
        return saved > SECONDS_PER_OPERATION and harmless

    def _bounds(self, acc: Acc, state: RoundedState) -> Tensor:
        """Return each group's clipping bounds, from the group's deviation or the largest deviation of its layers."""
        if self.per == "group":
            return self._clip(state.deviations(acc.residual))
        assert acc.moments is not None
        of_layers = (acc.moments[:, 1] / state.sizes).clamp(min=0).sqrt().float()
        deviations = torch.zeros(state.groups, device=acc.residual.device)
        deviations.scatter_reduce_(0, state.overlap_groups, of_layers[state.overlap_layers], "amax")
        return self._clip(deviations)

    def _clip(self, deviations: Tensor) -> Tensor:
        """Return the bounds -limit and limit for each group.

        There are none where entries are so large that squares overflow, and where all are equal: those would be clipped to 0.
        """
        sound = (deviations > 0) & (deviations < LARGEST_DEVIATION)
        limit = torch.where(sound, self.sigmas * deviations, math.inf)
        return torch.stack([-limit, limit], 1).flatten()


class RoundedState:
    """A bucket's state between steps: the number of steps, which seeds the random rounding, and memory for the update."""

    def __init__(self, layout: Layout, seed: int, group: int):
        self.seed, self.steps, self.group = seed, 0, group
        self.groups = kernels.groups(layout.total, group)
        self.sizes = torch.tensor(layout.sizes, dtype=torch.float64, device=layout.device).clamp(min=1)
        overlaps = []  # pairs of a group and a layer that have entries in common
        for layer, (begin, end) in enumerate(layout.spans):
            first, last = (min(entry // group, self.groups - 1) for entry in (begin, max(end - 1, begin)))
            overlaps += [(number, layer) for number in range(first, last + 1)]
        self.overlap_groups, self.overlap_layers = torch.tensor(overlaps, device=layout.device).T.contiguous()
        self.update: Tensor | None = None

    def key(self, rank: int, part: int) -> int:
        """Return the key of the random rounding. It differs for each seed, rank, step and part."""
        return (self.seed * 1_000_003 + self.steps & 0x7FFFFFFF) << 32 | (rank * 0x9E3779B1 + part & 0xFFFFFFFF)

    def zeros(self, like: Tensor) -> Tensor:
        """Return the update's memory, zeroed."""
        if self.update is None:
            self.update = torch.zeros_like(like)
        return self.update.zero_()

    def deviations(self, residual: Tensor) -> Tensor:
        """Return each group's standard deviation, for the bucket or a part of it."""
        # The last group may be longer or shorter than the others.
        begin = (kernels.groups(residual.numel(), self.group) - 1) * self.group
        last = residual[begin:].std(0, correction=0, keepdim=True)
        return torch.cat([residual[:begin].view(-1, self.group).std(1, correction=0), last]) if begin else last


@dataclass(frozen=True)
class GroupPartition:
    """A division of a bucket's n entries into one part for each rank. A part consists of whole groups.

    The last parts may be shorter, or empty.
    """

    n: int
    group: int
    ranks: int

    @property
    def size(self) -> int:
        return -(-kernels.groups(self.n, self.group) // self.ranks) * self.group

    @property
    def none_empty(self) -> bool:
        """True if every rank has at least one group."""
        return self.first(self.ranks - 1) < kernels.groups(self.n, self.group) * self.group

    def first(self, rank: int) -> int:
        return rank * self.size

    def length(self, rank: int) -> int:
        return self._end(rank) - self.first(rank)

    def part_of(self, flat: Tensor, rank: int) -> Tensor:
        return flat[self.first(rank) : self._end(rank)]

    def bounds_of(self, bounds: Tensor, rank: int) -> Tensor:
        """Return the bounds of the groups in a rank's part."""
        first = self.first(rank) // self.group
        return bounds[2 * first : 2 * (first + kernels.groups(self.length(rank), self.group))]

    def _end(self, rank: int) -> int:
        return self.n if rank == self.ranks - 1 else min(self.n, self.first(rank + 1))
