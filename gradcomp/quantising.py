"""What algorithms share that round every entry to one of a few levels: groups, clipping, payload, and two ways to the mean."""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradcomp import kernels, wire
from gradcomp.core import Acc, Compressor, Field, Form, Gather, Layout, Payload, Send, Steps, World

ROUTES = ("auto", "allgather", "alltoall")
SCOPES = ("layer", "group")

MOST_FED_BACK = 1.2
"""Of the squares of normal entries, what rounding may leave for error feedback. Below 1 the residual stays bounded; up to here
it grows like a random walk, as errors without feedback do; well above, by a factor each step."""
MOST_ROUNDED_TWICE = 0.8
"""The same, of what is not unbiased, for route=auto to choose parts, whose sums are rounded again."""

ROUND, BYTE = 2e-3, 8e-9
"""Seconds, for an estimate: of an operation of Horovod's, and of a byte on a link of 1 Gbit/s."""


@dataclass(frozen=True)
class Quantising(Compressor):
    """Cuts a bucket into groups, and sends for each its levels and for each entry the number of its level."""

    group: int = 2048  # entries that share levels; lower = smaller errors, more bytes
    sigmas: float = 0.0  # entries count as if they lay within so many standard deviations of 0; 0 = as they are
    per: str = "layer"  # whose deviation that is: the layer's, or the group's
    route: str = (
        "auto"  # allgather; alltoall, whose traffic does not grow with the ranks, rounds twice; auto = by what is sooner
    )

    def __post_init__(self) -> None:
        if self.group < 32:
            raise ValueError(f"{self.name}: group must be 32 or more, not {self.group}")
        if not 0 <= self.sigmas < math.inf:
            raise ValueError(f"{self.name}: sigmas must be 0 (off) or more, not {self.sigmas}")
        if self.per not in SCOPES:
            raise ValueError(f"{self.name}: per must be one of {', '.join(SCOPES)}, not {self.per!r}")
        if self.route not in ROUTES:
            raise ValueError(f"{self.name}: route must be one of {', '.join(ROUTES)}, not {self.route!r}")

    @property
    def name(self) -> str:
        """As a spec says it."""
        return type(self).__module__.rpartition(".")[2]

    @property
    @abstractmethod
    def rule(self) -> str:
        """What levels follow from: one of kernels.FORMS."""

    @property
    def count(self) -> int:
        """Levels of a group: 2, 3, 5 or 9."""
        return 2

    @property
    def drawn(self) -> bool:
        """Whether entries are rounded at random."""
        return True

    @property
    def travels(self) -> str:
        """Which levels do: all; the top one, of levels spread evenly about 0; the ends, where they are spread between them."""
        return "all"

    @property
    def unbiased(self) -> bool:
        return self.drawn and self.sigmas == 0

    def against_feedback(self) -> str | None:
        error = _error_of(self)
        if error <= MOST_FED_BACK:
            return None
        return (
            f"{self.name}: with error feedback, which momentum, masking, clip and sigmas need, what is left would grow without "
            f"end: rounding leaves {error:.1f} times the squares of what it is given. Less is left with fewer sigmas (1.5), "
            "more levels, or of qsgd with norm=max"
        )

    @property
    def moments(self) -> str | None:
        return "accumulated" if self.sigmas and self.per == "layer" else None

    def init(self, layout: Layout, seed: int) -> State:
        return State(layout, seed, self.group)

    def save(self, state: State) -> dict[str, Any]:
        return {"steps": state.steps}

    def load(self, state: State, saved: Mapping[str, Any]) -> None:
        state.steps = saved["steps"]

    def exchange(self, acc: Acc, state: State, world: World) -> Steps:
        state.steps += 1
        bounds = None if not self.sigmas else self._bounds(acc, state)
        whole = Rounding(self, acc.value.numel())
        if self.route == "alltoall" or (self.route == "auto" and self._prefers_parts(whole.form, world.size)):
            parts = Parts(acc.value.numel(), self.group, world.size)
            if parts.all_full:
                return (yield from self._by_parts(acc, state, world, parts, bounds))
        own = whole.take(acc.value, bounds, acc.flag, state.key(world.rank, 0))
        replies = yield Gather(own)
        update = state.zeros(acc.value)
        whole.add(update, replies, 1 / world.size)
        whole.settle(acc.value, own, update)
        return update

    def _by_parts(self, acc: Acc, state: State, world: World, parts: Parts, bounds: Tensor | None) -> Steps:
        """Every rank adds up a part, its own entries as they are, and rounds the sum; what that leaves over stays with it."""
        roundings = [Rounding(self, parts.length(rank)) for rank in range(world.size)]
        form = max((rounding.form for rounding in roundings), key=wire.size)
        own = parts.cut(acc.value, world.rank)
        sent = {}
        for rank, rounding in enumerate(roundings):
            if rank != world.rank:
                within = None if bounds is None else parts.bounds(bounds, rank)
                payload, key = wire.empty(form, own.device), state.key(world.rank, 1 + rank)
                sent[rank] = rounding.take(parts.cut(acc.value, rank), within, acc.flag, key, payload)
        came = yield Send(sent, world.others, form, own.device)
        sums, mine = own.clone(), roundings[world.rank]
        mine.add(sums, [came[rank] for rank in sorted(came)], 1.0)
        flags = [payload["header"][1:] for payload in came.values()] + ([] if acc.flag is None else [acc.flag])
        flag = torch.stack(flags).amax(0) if flags else None
        limits = self._within(state.deviations(sums)) if self.sigmas else None  # layers' deviations are not those of sums
        results = yield Gather(mine.take(sums, limits, flag, state.key(world.rank, 0), wire.empty(form, acc.value.device)))
        update = state.zeros(acc.value)
        for rank, result in enumerate(results):
            roundings[rank].add(parts.cut(update, rank), [result], 1 / world.size)
            if rank in sent:
                roundings[rank].settle(parts.cut(acc.value, rank), sent[rank], parts.cut(update, rank))
        own.copy_(torch.where(parts.cut(update, world.rank)[:1].isfinite(), sums, own))
        return update

    def _prefers_parts(self, form: Form, ranks: int) -> bool:
        """A gather sends a payload P - 1 times; parts there and back are 2 (P - 1) / P of it, in two operations. But where the
        residual hardly shrinks, it would not with a second rounding."""
        sooner = (ranks - 1) * (1 - 2 / ranks) * wire.size(form) * BYTE > ROUND
        return sooner and (self.unbiased or _error_of(self) < MOST_ROUNDED_TWICE)

    def _bounds(self, acc: Acc, state: State) -> Tensor:
        """Two for each group: no entry counts as further from 0 than so many deviations of its layer, or of the group."""
        if self.per == "group":
            return self._within(state.deviations(acc.value))
        assert acc.moments is not None
        of_layers = (acc.moments[:, 1] / state.sizes).clamp(min=0).sqrt().float()
        deviations = torch.zeros(state.groups, device=acc.value.device)
        deviations.scatter_reduce_(0, state.touched, of_layers[state.touching], "amax")
        return self._within(deviations)

    def _within(self, deviations: Tensor) -> Tensor:
        most = self.sigmas * deviations
        return torch.stack([-most, most], 1).flatten()


@dataclass(frozen=True)
class Multilevel(Quantising):
    """With as many levels as a knob says."""

    levels: int = 5
    least: ClassVar[int] = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        known = [count for count in kernels.PER_WORD if count >= self.least]
        if self.levels not in known:
            raise ValueError(f"{self.name}: levels must be one of {', '.join(map(str, known))}, not {self.levels}")

    @property
    def count(self) -> int:
        return self.levels


class Rounding:
    """The payload of so many entries, and what is done with it."""

    def __init__(self, how: Quantising, n: int):
        self.how = how
        self.groups = kernels.groups(n, how.group)
        self.each = {"all": how.count, "top": 1, "ends": 2}[how.travels]
        self.form: Form = (
            Field("header", torch.int32, 2),
            Field("levels", torch.float32, self.groups * self.each),
            Field("words", torch.int64, kernels.words(n, how.group, how.count)),
        )

    def take(
        self, value: Tensor, bounds: Tensor | None, flag: Tensor | None, key: int, payload: Payload | None = None
    ) -> Payload:
        """Rounds value, which keeps what that leaves over; payload: to be filled, of this form or with more room."""
        how, device = self.how, value.device
        payload = wire.empty(self.form, device) if payload is None else payload
        levels = torch.empty(self.groups * how.count, device=device)
        cuts = torch.empty(self.groups, device=device)
        kernels.find_levels(value, how.rule, how.group, how.count, levels, cuts, bounds)
        rows = levels.view(self.groups, how.count)
        chosen = {"all": rows, "top": rows[:, -1:], "ends": rows[:, :: how.count - 1]}[how.travels]
        payload["levels"][: self.groups * self.each].copy_(chosen.flatten())
        payload["header"].zero_()
        if flag is not None:
            payload["header"][1:].copy_(flag)
        by = None if how.drawn else cuts
        kernels.take_levels(value, self._levels(payload), how.group, how.count, key, self._words(payload), by)
        return payload

    def add(self, target: Tensor, payloads: Sequence[Payload], scale: float) -> None:
        levels, words = [*map(self._levels, payloads)], [*map(self._words, payloads)]
        headers = [payload["header"] for payload in payloads]
        kernels.add_levels(target, levels, words, headers, self.how.group, self.how.count, scale)

    def settle(self, value: Tensor, payload: Payload, update: Tensor) -> None:
        kernels.settle_levels(value, self._levels(payload), self._words(payload), self.how.group, self.how.count, update)

    def _words(self, payload: Payload) -> Tensor:
        return payload["words"][: self.form[-1].length]

    def _levels(self, payload: Payload) -> Tensor:
        """All levels, of those that travel."""
        sent = payload["levels"][: self.groups * self.each]
        if self.how.travels == "all":
            return sent
        share = torch.linspace(0, 1, self.how.count, device=sent.device)
        ends = sent.view(self.groups, self.each)
        low = -ends if self.how.travels == "top" else ends[:, :1]
        return (low * (1 - share) + ends[:, -1:] * share).flatten()


class State:
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

    def deviations(self, value: Tensor) -> Tensor:
        """Each group's; of the bucket, or a part of it."""
        whole = (kernels.groups(value.numel(), self.group) - 1) * self.group
        last = value[whole:].std(0, correction=0, keepdim=True)
        return torch.cat([value[:whole].view(-1, self.group).std(1, correction=0), last]) if whole else last


@dataclass(frozen=True)
class Parts:
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
        return self.begin(self.ranks - 1) < kernels.groups(self.n, self.group) * self.group

    def begin(self, rank: int) -> int:
        return rank * self.size

    def length(self, rank: int) -> int:
        return self._end(rank) - self.begin(rank)

    def cut(self, flat: Tensor, rank: int) -> Tensor:
        return flat[self.begin(rank) : self._end(rank)]

    def bounds(self, bounds: Tensor, rank: int) -> Tensor:
        first = self.begin(rank) // self.group
        return bounds[2 * first : 2 * (first + kernels.groups(self.length(rank), self.group))]

    def _end(self, rank: int) -> int:
        return self.n if rank == self.ranks - 1 else min(self.n, self.begin(rank + 1))


@functools.cache
def _error_of(how: Quantising) -> float:
    """What rounding leaves of a group of normal entries, as a share of their squares."""
    value = torch.randn(how.group, generator=torch.Generator().manual_seed(0))
    whole = value.square().sum()
    bounds = how._within(value.std(0, correction=0, keepdim=True)) if how.sigmas else None
    Rounding(how, how.group).take(value, bounds, None, key=0)
    return float(value.square().sum() / whole)
