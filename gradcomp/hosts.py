"""Dense inside a host, compressed between hosts: the ranks of a host are one sender, and share its work.

What a rank has accumulated moves, part by part, to the ranks of its host that have these parts. There the compressor works on
the host's sum, together with the ranks that have the same part on the other hosts, and the parts' updates come together inside
the host again. All of it is sends, so that no process sets are needed.
"""

from __future__ import annotations

import functools
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradcomp import kernels, wire
from gradcomp.core import (
    Acc,
    Compressor,
    Field,
    Form,
    Gather,
    Layer,
    Layout,
    Payload,
    Reduce,
    Reply,
    Request,
    Send,
    Steps,
    World,
)


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
class ByHost(Compressor):
    """Another compressor between hosts; what a host's ranks send one another is dense."""

    inner: Compressor

    def __post_init__(self) -> None:
        if self.inner.moments == "raw":
            raise ValueError(
                "by_host and stat=raw do not go together: no rank has the gradients of its host before they are summed"
            )
        if self.inner.needs_rates:
            raise ValueError("by_host and an lr_revision that needs the learning rates do not go together")
        if self.inner.tells_ends_apart:
            raise ValueError("by_host deals the model out in parts, so that no rank knows first and last layers: not for lgc")

    @property
    def whole_model(self) -> bool:
        return self.inner.whole_model

    @property
    def unbiased(self) -> bool:
        return self.inner.unbiased

    def against_feedback(self) -> str | None:
        return self.inner.against_feedback()

    @property
    def local_momentum(self) -> float:
        return self.inner.local_momentum

    def choose(self, name: str, layer: Layer) -> Compressor:
        chosen = self.inner.choose(name, layer)
        return self if chosen is self.inner else ByHost(chosen)

    def eased(self, progress: float) -> Compressor | None:
        gentler = self.inner.eased(progress)
        return None if gentler is None else ByHost(gentler)

    def init(self, layout: Layout, seed: int) -> Share:
        return Share(layout, seed)

    def save(self, state: Share) -> dict[str, Any]:
        return {} if state.state is None else self.inner.save(state.state)

    def load(self, state: Share, saved: Mapping[str, Any]) -> None:
        state.saved = saved

    def exchange(self, acc: Acc, state: Share, world: World) -> Steps:
        place = place_of(world)
        state.settle_at(self.inner, place)
        own = yield from _move(acc, state, place)
        update = yield from _among(self.inner.exchange(own, state.state, place.world), place)
        state.cut(acc.value, place.part).copy_(own.value[: len(state.cut(acc.value, place.part))])
        update = yield from _together(update, state, place)
        if acc.velocity is not None:
            acc.velocity.masked_fill_((update != 0) & update.isfinite(), 0.0)
        return update


class Share:
    """What one rank keeps of a bucket: its own part's state. Made once the ranks' places are known, and anew if they change.

    All parts are equally long, so that all ranks ask for the same: a last one that is not full ends with zeros.
    """

    def __init__(self, layout: Layout, seed: int):
        self.layout, self.seed = layout, seed
        self.place: Place | None = None
        self.saved: Mapping[str, Any] | None = None
        self.state: Any = None
        self.pieces = layout
        self.moments: Tensor | None = None
        self.peaks: Tensor | None = None

    def settle_at(self, inner: Compressor, place: Place) -> None:
        if place != self.place:
            self.place = place
            self.pieces = self._pieces(place.part)
            self.state = inner.init(self.pieces, self.seed)
            if inner.moments is not None:
                layers = len(self.pieces.names)
                self.moments = torch.zeros(layers, kernels.MOMENTS, dtype=torch.float64, device=self.layout.device)
            self.peaks = kernels.peaks(self.length, self.layout.device) if inner.sparse else None
        if self.saved is not None:
            inner.load(self.state, self.saved)
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

    def cut(self, flat: Tensor, part: int) -> Tensor:
        """What there is of a part."""
        return flat[part * self.length : (part + 1) * self.length]

    def whole(self, flat: Tensor, part: int) -> Tensor:
        """A part in its full length: where it lies, or with zeros behind it."""
        there = self.cut(flat, part)
        return there if len(there) == self.length else torch.nn.functional.pad(there, (0, self.length - len(there)))

    def payload(self, part: Tensor, flag: Tensor | None) -> Payload:
        payload = wire.empty(self.form, part.device)
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


def _move(acc: Acc, state: Share, place: Place) -> Generator[Request, Any, Acc]:
    """Every part of what was accumulated goes to the rank that has it. The own part, to which is added what comes."""
    others = {rank: part for part, rank in enumerate(place.host) if part != place.part}
    parts = {rank: state.payload(state.whole(acc.value, part), acc.flag) for rank, part in others.items()}
    came = yield Send(parts, parts.keys(), state.form, acc.value.device)
    for part in others.values():
        state.cut(acc.value, part).zero_()
    own = state.whole(acc.value, place.part)
    total = torch.zeros_like(own)
    for rank in sorted(came):
        total += came[rank]["values"]
    flag = torch.zeros(1, dtype=torch.int32, device=own.device)
    kernels.accumulate(total.split(state.pieces.sizes), own, None, flag, moments=state.moments, peaks=state.peaks)
    flags = [flag, *(each["flag"] for each in came.values()), *([] if acc.flag is None else [acc.flag])]
    return Acc(own, None, torch.stack(flags).amax(0), state.moments, peaks=state.peaks)


def _together(update: Tensor, state: Share, place: Place) -> Steps:
    """All parts' updates, of means over hosts, as the update of the mean over ranks."""
    own = state.payload(update, None)
    kernels.wipe(update)
    parts = yield from _gather(own, place.host, place)
    return torch.cat([each["values"] for each in parts])[: state.layout.total].div_(len(place.host))


def _among(steps: Steps, place: Place) -> Steps:
    """An exchange among those who have the same part: each of its requests is one send among all ranks."""
    reply: Reply | None = None
    while True:
        try:
            request: Request = steps.send(reply)
        except StopIteration as end:
            update: Tensor = end.value
            return update
        match request:
            case Gather(payload):
                reply = yield from _gather(payload, place.peers, place)
            case Reduce(tensor, scale):
                payloads = yield from _gather(wire.whole(tensor), place.peers, place)
                reply = sum((each["bytes"] for each in payloads[1:]), payloads[0]["bytes"].clone()).mul_(scale)
            case Send(parts, senders, form, device):
                there = {place.peers[rank]: payload for rank, payload in parts.items()}
                came = yield Send(there, [place.peers[rank] for rank in senders], form, device)
                reply = {i: came[rank] for i, rank in enumerate(place.peers) if rank in came}


def _gather(payload: Payload, ranks: tuple[int, ...], place: Place) -> Generator[Request, Any, list[Payload]]:
    """The payloads of these ranks, of which this is one."""
    others = [rank for rank in ranks if rank != place.host[place.part]]
    came = yield Send(dict.fromkeys(others, payload), others, payload.form, payload.bytes.device)
    return [came.get(rank, payload) for rank in ranks]
