"""Dense inside a host, compressed between hosts: the ranks of a host are one sender, and share its work.

What a rank has accumulated moves, part by part, to the ranks of its host that have these parts. There the compressor works on
the host's sum, together with the ranks that have the same part on the other hosts, and the parts' updates come together inside
the host again. All of it is sends, so that no process sets are needed.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradcomp.engine.wrapper import Wrapper
from gradcomp.messages import payload as payloads
from gradcomp.native import kernels
from gradcomp.native.extension import MOMENTS
from gradcomp.native.memory import Memory, Update
from gradcomp.protocol import Acc, Compressor, Layout, Steps, Traits
from gradcomp.requests import Asking, Field, Form, Gather, Payload, Reduce, Reply, Request, Send, World, send


class Place(NamedTuple):
    """A rank's place: the ranks of its host, and those with its part on every host."""

    host: tuple[int, ...]
    peers: tuple[int, ...]
    part: int
    world: World


@functools.cache
def place_of(world: World) -> Place:
    """Refuses hosts with unequal numbers of ranks."""
    hosts = world.hosts if world.hosts is not None else tuple(range(world.size))
    by_host: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    counts = [len(ranks) for ranks in by_host.values()]
    if len(set(counts)) > 1:
        raise ValueError(f"by_host needs as many ranks on every host, but there are {', '.join(map(str, counts))}")
    own = by_host[hosts[world.rank]]
    part = own.index(world.rank)
    peers = tuple(ranks[part] for ranks in by_host.values())
    return Place(tuple(own), peers, part, World(peers.index(world.rank), len(peers)))


@dataclass(frozen=True)
class ByHost(Wrapper):
    """Another compressor between hosts; what a host's ranks send one another is dense."""

    def __post_init__(self) -> None:
        super().__post_init__()
        own = self.inner.traits
        reasons = {
            "it reads statistics of the raw gradient, and the host's gradients are only there as a sum": own.moments == "raw",
            "it needs the layers' learning rates, and a rank has a part of what waits, across layers": own.rates == "needed",
            "it knows first and last layers, and a rank has a part of the model, across layers": own.ends,
        }
        for reason, holds in reasons.items():
            if holds:
                raise ValueError(f"{self.inner} cannot go by_host: {reason}")

    def added(self) -> list[str]:
        return ["by_host=true"]

    @property
    def traits(self) -> Traits:
        return replace(self.inner.traits, rates="unused")

    def init(self, layout: Layout, seed: int) -> Share:
        return Share(layout, seed)

    def save(self, state: Share) -> dict[str, Any]:
        return super().save(state) if state.saved is None and state.inner is not None else dict(state.saved or {})

    def load(self, state: Share, saved: Mapping[str, Any]) -> None:
        state.saved = saved or None
        if state.inner is not None:
            state.restore(self.inner)

    def alike(self, state: Share) -> str:
        return "" if state.inner is None else super().alike(state)

    def stats(self, state: Share) -> dict[str, Any]:
        return {} if state.inner is None else super().stats(state)

    def exchange(self, acc: Acc, state: Share, world: World) -> Steps:
        place = place_of(world)
        state.settle_at(self.inner, place)
        own = yield from _move(acc, state, place)
        update = yield from _among(self.inner.exchange(own, state.inner, place.world), place)
        state.part_of(acc.residual, place.part).copy_(own.residual[: len(state.part_of(acc.residual, place.part))])
        whole = yield from _together(update, state, place, acc.memory)
        if acc.velocity is not None:
            acc.velocity.masked_fill_((whole != 0) & whole.isfinite(), 0.0)
        return Update(whole)


class Share:
    """What one rank keeps of a bucket: its own part's state. Made once the ranks' places are known, and anew if they change.

    All parts are equally long, so that all ranks ask for the same: a last one that is not full ends with zeros.
    """

    def __init__(self, layout: Layout, seed: int):
        self.layout, self.seed = layout, seed
        self.place: Place | None = None
        self.saved: Mapping[str, Any] | None = None
        self.inner: Any = None
        self.pieces = layout
        self.moments: Tensor | None = None
        self.peaks: Tensor | None = None

    def settle_at(self, inner: Compressor, place: Place) -> None:
        if place != self.place:
            self.place = place
            self.pieces = self._pieces(place.part)
            self.inner = inner.init(self.pieces, self.seed)
            if inner.traits.moments is not None:
                layers = len(self.pieces.names)
                self.moments = torch.zeros(layers, MOMENTS, dtype=torch.float64, device=self.layout.device)
            self.peaks = kernels.peaks(self.length, self.layout.device) if inner.traits.sparse else None
        self.restore(inner)

    def restore(self, inner: Compressor) -> None:
        """Hand on what was loaded, now that there is a state."""
        if self.saved is not None:
            inner.load(self.inner, self.saved)
            self.saved = None

    @property
    def length(self) -> int:
        """Entries of a part."""
        assert self.place is not None
        return -(-self.layout.total // len(self.place.host))

    @property
    def form(self) -> Form:
        """A part on its way inside the host, and whether a gradient was not finite."""
        return Field("flag", torch.int32, 1), Field("values", torch.float32, self.length)

    def part_of(self, flat: Tensor, part: int) -> Tensor:
        """What there is of a part."""
        return flat[part * self.length : (part + 1) * self.length]

    def whole(self, flat: Tensor, part: int) -> Tensor:
        """A part in its full length: where it lies, or with zeros behind it."""
        there = self.part_of(flat, part)
        return there if len(there) == self.length else torch.nn.functional.pad(there, (0, self.length - len(there)))

    def payload(self, part: Tensor, flag: Tensor | None) -> Payload:
        payload = payloads.empty(self.form, part.device)
        payload["flag"].zero_()
        if flag is not None:
            payload["flag"].copy_(flag)
        payload["values"].copy_(part)
        return payload

    def _pieces(self, part: int) -> Layout:
        """The layers, as far as they lie in a part; its zeros are one more."""
        begin = part * self.length
        names, sizes, at = [], [], 0
        for name, size in zip(self.layout.names, self.layout.sizes, strict=True):
            inside = min(at + size, begin + self.length) - max(at, begin)
            if inside > 0:
                names.append(name)
                sizes.append(inside)
            at += size
        if sum(sizes) < self.length:
            names.append("")
            sizes.append(self.length - sum(sizes))
        return Layout(tuple(names), tuple(sizes), self.layout.device)


def _move(acc: Acc, state: Share, place: Place) -> Asking[Acc]:
    """Every part of what was accumulated goes to the rank that has it. The own part, to which is added what comes."""
    others = {rank: part for part, rank in enumerate(place.host) if part != place.part}
    parts = {rank: state.payload(state.whole(acc.residual, part), acc.flag) for rank, part in others.items()}
    came = yield from send(parts, parts.keys(), state.form, acc.residual.device)
    for part in others.values():
        state.part_of(acc.residual, part).zero_()
    own = state.whole(acc.residual, place.part)
    total = torch.zeros_like(own)
    for rank in sorted(came):
        total += came[rank]["values"]
    flag = torch.zeros(1, dtype=torch.int32, device=own.device)
    kernels.accumulate(
        total.split(state.pieces.sizes), own, None, flag, moments=state.moments, peaks=state.peaks, memory=acc.memory
    )
    flags = [flag, *(each["flag"] for each in came.values()), *([] if acc.flag is None else [acc.flag])]
    return Acc(own, acc.memory, None, torch.stack(flags).amax(0), state.moments, peaks=state.peaks)


def _together(update: Update, state: Share, place: Place, memory: Memory) -> Asking[Tensor]:
    """All parts' updates, of means over hosts, as the update of the mean over ranks."""
    own = state.payload(update.flat, None)
    memory.give_back(update)
    parts = yield from _gather(own, place.host, place)
    return torch.cat([each["values"] for each in parts])[: state.layout.total].div_(len(place.host))


def _among(steps: Steps, place: Place) -> Steps:
    """An exchange among those who have the same part: each of its requests is one send among all ranks."""
    reply: Reply | None = None
    while True:
        try:
            request: Request = steps.send(reply)
        except StopIteration as end:
            update: Update = end.value
            return update
        match request:
            case Gather(payload):
                reply = yield from _gather(payload, place.peers, place)
            case Reduce(tensor, scale):
                came = yield from _gather(payloads.whole(tensor), place.peers, place)
                total = came[0]["bytes"].clone()
                for other in came[1:]:
                    total += other["bytes"]
                reply = total.mul_(scale)
            case Send(outgoing, senders, form, device):
                there = {place.peers[rank]: payload for rank, payload in outgoing.items()}
                sent = yield from send(there, [place.peers[rank] for rank in senders], form, device)
                reply = {i: sent[rank] for i, rank in enumerate(place.peers) if rank in sent}


def _gather(payload: Payload, ranks: tuple[int, ...], place: Place) -> Asking[list[Payload]]:
    """The payloads of these ranks, of which this is one."""
    others = [rank for rank in ranks if rank != place.host[place.part]]
    came = yield from send(dict.fromkeys(others, payload), others, payload.form, payload.bytes.device)
    return [came.get(rank, payload) for rank in ranks]
