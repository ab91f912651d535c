"""ByHost: dense inside a host, compressed between hosts. The ranks of a host act as one sender and share its work.

A bucket has as many parts as a host has ranks, and each rank owns one part. An exchange has three stages. Every rank sends its
accumulated parts to their owners on its host, which add them up. The compressor exchanges the host's sum with the owners of the
same part on the other hosts. The ranks of a host send one another the updates of their parts. All stages consist of sends, so
that no process sets are needed.
"""

from __future__ import annotations

import functools
import math
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
from gradcomp.requests import Field, Form, Gather, Payload, Reduce, Reply, Request, Requests, Send, World, send

# The largest magnitude of an entry that a rank gets from the others on its host. It leaves space for the rank's own entry.
LARGEST_OF_HOST = 2.0**124


class Position(NamedTuple):
    """A rank's position among the hosts.

    neighbours: the ranks of its host, in the order of their parts. part: the part that it owns.
    peers: the owners of the same part, one on each host. peer_world: the world of the peers.
    """

    neighbours: tuple[int, ...]
    part: int
    peers: tuple[int, ...]
    peer_world: World


@functools.cache
def position_of(world: World) -> Position:
    """Find a rank's position. Refuse hosts with different numbers of ranks."""
    hosts = world.hosts if world.hosts is not None else tuple(range(world.size))
    ranks_of: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks_of.setdefault(host, []).append(rank)
    counts = [len(ranks) for ranks in ranks_of.values()]
    if len(set(counts)) > 1:
        raise ValueError(
            f"by_host=true needs as many ranks on every host, but the hosts have {', '.join(map(str, counts))}; start the same "
            "number on each"
        )
    neighbours = ranks_of[hosts[world.rank]]
    part = neighbours.index(world.rank)
    peers = tuple(ranks[part] for ranks in ranks_of.values())
    return Position(tuple(neighbours), part, peers, World(peers.index(world.rank), len(peers)))


@dataclass(frozen=True)
class ByHost(Wrapper):
    """A wrapper that uses its compressor between hosts only. The ranks of a host exchange dense parts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        traits = self.inner.traits
        reasons = {
            "it reads statistics of the raw gradient, but a rank has only the sum over its host": traits.moments == "raw",
            "it needs the layers' learning rates, but a rank's part cuts through layers": traits.rates == "needed",
            "it treats the first and last layers differently, but a rank's part cuts through layers": traits.ends,
        }
        for reason in (reason for reason, holds in reasons.items() if holds):
            raise ValueError(f"{self.inner} cannot use by_host: {reason}; leave by_host out")

    def added_knobs(self) -> list[str]:
        return ["by_host=true"]

    @property
    def traits(self) -> Traits:
        return replace(self.inner.traits, rates="unused")

    def init(self, layout: Layout, seed: int) -> PartState:
        return PartState(layout, seed)

    def save(self, state: PartState) -> dict[str, Any]:
        return super().save(state) if state.saved is None and state.inner is not None else dict(state.saved or {})

    def load(self, state: PartState, saved: Mapping[str, Any]) -> None:
        state.saved = saved or None
        if state.inner is not None:
            state.restore(self.inner)

    def common_state(self, state: PartState) -> str:
        return "" if state.inner is None else super().common_state(state)

    def stats(self, state: PartState) -> dict[str, Any]:
        return {} if state.inner is None else super().stats(state)

    def exchange(self, acc: Acc, state: PartState, world: World) -> Steps:
        position = position_of(world)
        state.move_to(self.inner, position)
        most = math.inf if self.inner.traits.unbiased else LARGEST_OF_HOST / len(position.neighbours)
        host_acc = yield from _sum_in_host(acc, state, position, most)
        part_update = yield from _exchange_among_peers(
            self.inner.exchange(host_acc, state.inner, position.peer_world), position
        )
        part = state.slice(acc.residual, position.part)
        part.copy_(host_acc.residual[: len(part)])
        update = yield from _gather_parts(part_update, state, position, acc.memory)
        if acc.velocity is not None:
            acc.velocity.masked_fill_((update != 0) & update.isfinite(), 0.0)
        return Update(update)


class PartState:
    """The state of this rank's part of a bucket. move_to() makes it anew whenever the rank's position changes.

    All parts are equally long, so that all ranks yield the same requests. Zeros fill up a last part that is shorter.
    """

    def __init__(self, layout: Layout, seed: int):
        self.layout, self.seed = layout, seed
        self.position: Position | None = None
        self.saved: Mapping[str, Any] | None = None
        self.inner: Any = None
        self.part_layout = layout
        self.moments: Tensor | None = None
        self.peaks: Tensor | None = None

    def move_to(self, inner: Compressor, position: Position) -> None:
        """Make the inner compressor's state if the position changed, and restore a saved state."""
        if position != self.position:
            self.position = position
            self.part_layout = self._layout_of(position.part)
            self.inner = inner.init(self.part_layout, self.seed)
            if inner.traits.moments is not None:
                layers = len(self.part_layout.names)
                self.moments = torch.zeros(layers, MOMENTS, dtype=torch.float64, device=self.layout.device)
            self.peaks = kernels.peaks(self.length, self.layout.device) if inner.traits.sparse else None
        self.restore(inner)

    def restore(self, inner: Compressor) -> None:
        """Load the saved state into the inner compressor's state."""
        if self.saved is not None:
            inner.load(self.inner, self.saved)
            self.saved = None

    @property
    def length(self) -> int:
        """Return the number of entries of a part."""
        assert self.position is not None
        return -(-self.layout.total // len(self.position.neighbours))

    @property
    def form(self) -> Form:
        """Return the form of a part's payload: its entries, and a flag that is not 0 where a gradient was not finite."""
        return Field("flag", torch.int32, 1), Field("values", torch.float32, self.length)

    def slice(self, flat: Tensor, part: int) -> Tensor:
        """Slice a part out of the bucket's flat array. The last one may be shorter than a part, or empty."""
        return flat[part * self.length : (part + 1) * self.length]

    def padded(self, flat: Tensor, part: int) -> Tensor:
        """Return a part in its full length: a view of the bucket's array, or a copy that ends with zeros."""
        view = self.slice(flat, part)
        return view if len(view) == self.length else torch.nn.functional.pad(view, (0, self.length - len(view)))

    def payload(self, values: Tensor, flag: Tensor | None, most: float = math.inf) -> Payload:
        """Copy a part into a payload. most: the largest magnitude to send."""
        payload = payloads.empty(self.form, values.device)
        payload["flag"].zero_()
        if flag is not None:
            payload["flag"].copy_(flag)
        torch.clamp(values, -most, most, out=payload["values"])
        return payload

    def _layout_of(self, part: int) -> Layout:
        """Cut the layers to a part. The zeros that fill it up become one more layer."""
        begin = part * self.length
        names, sizes = [], []
        for name, (first, end) in zip(self.layout.names, self.layout.spans, strict=True):
            inside = min(end, begin + self.length) - max(first, begin)
            if inside > 0:
                names.append(name)
                sizes.append(inside)
        if sum(sizes) < self.length:
            names.append("")
            sizes.append(self.length - sum(sizes))
        return Layout(tuple(names), tuple(sizes), self.layout.device)


def _sum_in_host(acc: Acc, state: PartState, position: Position, most: float) -> Requests[Acc]:
    """Send every part, up to most, to its owner on this host; keep the rest. Return the acc of the own part: the host's sum."""
    owners = {rank: part for part, rank in enumerate(position.neighbours) if part != position.part}
    outgoing = {rank: state.payload(state.padded(acc.residual, part), acc.flag, most) for rank, part in owners.items()}
    received = yield from send(outgoing, outgoing.keys(), state.form, acc.residual.device)
    for part in owners.values():
        given = state.slice(acc.residual, part)
        given -= given.clamp(-most, most)
    residual = state.padded(acc.residual, position.part)
    total = torch.zeros_like(residual)
    for rank in sorted(received):
        total += received[rank]["values"]
    flag, parts = torch.zeros(1, dtype=torch.int32, device=residual.device), total.split(state.part_layout.sizes)
    kernels.accumulate(parts, residual, None, flag, moments=state.moments, peaks=state.peaks, memory=acc.memory)
    flags = [flag, *(payload["flag"] for payload in received.values()), *([] if acc.flag is None else [acc.flag])]
    return Acc(residual, acc.memory, None, torch.stack(flags).amax(0), state.moments, peaks=state.peaks)


def _gather_parts(update: Update, state: PartState, position: Position, memory: Memory) -> Requests[Tensor]:
    """Gather the updates of all parts inside the host. Turn the mean over hosts into the mean over ranks."""
    payload = state.payload(update.flat, None)
    memory.give_back(update)
    parts = yield from _gather_from(position.neighbours, payload, position)
    return torch.cat([part["values"] for part in parts])[: state.layout.total].div_(len(position.neighbours))


def _exchange_among_peers(steps: Steps, position: Position) -> Steps:
    """Run an exchange among the peers. Each of its requests becomes one send among all ranks."""
    reply: Reply | None = None
    while True:
        try:
            request: Request = steps.send(reply)
        except StopIteration as end:
            update: Update = end.value
            return update
        match request:
            case Gather(payload):
                reply = yield from _gather_from(position.peers, payload, position)
            case Reduce(tensor, scale):
                received = yield from _gather_from(position.peers, payloads.wrap(tensor), position)
                total = received[0]["bytes"].clone()
                for other in received[1:]:
                    total += other["bytes"]
                reply = total.mul_(scale)
            case Send(outgoing, senders, form, device):
                to_ranks = {position.peers[peer]: payload for peer, payload in outgoing.items()}
                sent = yield from send(to_ranks, [position.peers[peer] for peer in senders], form, device)
                reply = {peer: sent[rank] for peer, rank in enumerate(position.peers) if rank in sent}


def _gather_from(ranks: tuple[int, ...], payload: Payload, position: Position) -> Requests[list[Payload]]:
    """Gather the payloads of these ranks, which include this one, by a send."""
    others = [rank for rank in ranks if rank != position.neighbours[position.part]]
    received = yield from send(dict.fromkeys(others, payload), others, payload.form, payload.bytes.device)
    return [received.get(rank, payload) for rank in ranks]
