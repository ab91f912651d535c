"""ByHost: dense inside a host, compressed between hosts. The ranks of a host act as one sender and share its work.

A bucket has as many shards as a host has ranks, and each rank owns one. An exchange has three stages. Every rank sends its
accumulated shards to their owners on its host, which add them up. The compressor exchanges the host's sum with the owners of
the same shard on the other hosts. The ranks of a host send one another the updates of their shards. All stages consist of
sends, so that no process sets are needed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradcomp.core.by_layer import ByLayer
from gradcomp.core.compressor import Acc, Compressor, Layout, Steps, Traits
from gradcomp.core.requests import Field, Form, Gather, Payload, Reduce, Reply, Request, Requests, Send, World, send
from gradcomp.core.wrapper import Wrapper
from gradcomp.messages import payload as payloads
from gradcomp.native import kernels
from gradcomp.native.extension import LARGEST, MOMENTS
from gradcomp.native.memory import Memory, Update
from gradcomp.saved import check_int, entry, read_int, read_ints, table_or_empty


@dataclass(frozen=True)
class ByHost(Wrapper):
    """A wrapper that uses its compressor between hosts only. The ranks of a host exchange dense shards."""

    def __post_init__(self) -> None:
        super().__post_init__()
        traits = self.inner.traits
        reasons = {
            "it needs the layers' learning rates, but a rank's shard cuts through layers": traits.rates == "needed",
            "it treats the first and last layers differently, but a rank's shard cuts through layers": traits.ends,
        }
        for reason, holds in reasons.items():
            if holds:
                raise ValueError(f"{self.inner} cannot use by_host: {reason}; leave by_host out, or take another spec")

    def added_knobs(self) -> list[str]:
        return ["by_host=true"]

    @property
    def traits(self) -> Traits:
        return replace(self.inner.traits, rates="unused", shares_residual=True)

    def init(self, layout: Layout, seed: int) -> ShardState:
        return ShardState(layout, seed)

    def save(self, state: ShardState) -> dict[str, Any]:
        if state.saved is not None:
            return dict(state.saved)
        inner = {} if state.inner is None else super().save(state)
        return {"exchanges": state.exchanges, "place": state.place, "inner": inner}

    def load(self, state: ShardState, saved: Mapping[str, Any]) -> None:
        state.load(self.inner, saved)

    def save_shared(self, state: ShardState) -> dict[str, Any]:
        """Copy the number of exchanges. The rest differs between the ranks of a host."""
        return {"exchanges": state.exchanges}

    def load_shared(self, state: ShardState, saved: Mapping[str, Any]) -> None:
        """Make the inner compressor's state anew: no rank has the states of all shards."""
        state.forget()

    def stats(self, state: ShardState) -> dict[str, Any]:
        return {} if state.inner is None else super().stats(state)

    def exchange(self, acc: Acc, state: ShardState, world: World) -> Steps:
        position = position_of(world)
        state.move_to(self.inner, position)
        state.exchanges += 1
        empty = None if acc.ages is None else acc.residual == 0  # the residual of other entries may lie on a neighbour
        host_acc = yield from _sum_in_host(acc, state, position)
        shard_update = yield from _exchange_among_peers(
            self.inner.exchange(host_acc, state.inner, position.peer_world), position
        )
        shard = state.slice(acc.residual, position.shard)
        torch.mul(host_acc.residual[: len(shard)], 1 / position.host_world.share, out=shard).clamp_(-LARGEST, LARGEST)
        update = yield from _gather_shards(shard_update, state, position, acc.memory)
        if acc.ages is not None and empty is not None:
            acc.ages.masked_fill_(empty | ((update != 0) & update.isfinite()), 0)
        return Update(update)


def between_hosts(compressor: Compressor) -> Compressor:
    """Use a compressor between hosts only, also one in rules for layers."""
    match compressor:
        case ByHost():
            return compressor
        case Wrapper():
            return compressor.wrap(between_hosts(compressor.inner))
        case ByLayer(rules, default):
            return ByLayer(tuple((pattern, between_hosts(each)) for pattern, each in rules), between_hosts(default))
    return ByHost(compressor)


def _sum_in_host(acc: Acc, state: ShardState, position: Position) -> Requests[Acc]:
    """Send shares of every shard to its owner on this host. Return the acc of the own shard: the sum of the host's shares."""
    owners = {rank: shard for shard, rank in enumerate(position.neighbours) if shard != position.shard}
    share = position.host_world.share
    number = acc.frozen_number
    outgoing = {
        rank: state.payload(state.padded(acc.residual, shard), acc.flag, share, number) for rank, shard in owners.items()
    }
    received = yield from send(outgoing, outgoing.keys(), state.form, acc.residual.device)
    for shard in owners.values():
        state.slice(acc.residual, shard).zero_()
    total = state.padded(acc.residual, position.shard) * share
    for rank in sorted(received):
        total += received[rank]["values"]
    residual, flag = torch.empty_like(total), torch.zeros(1, dtype=torch.int32, device=total.device)
    kernels.collect(total.split(state.shard_layout.sizes), residual, flag, moments=state.moments, memory=acc.memory)
    flags = [flag, *(payload["flag"][:1] for payload in received.values()), *([] if acc.flag is None else [acc.flag])]
    found = Acc(residual, acc.memory, None, torch.stack(flags).amax(0), state.moments)
    if not number:
        return found
    numbers = torch.stack([total.new_tensor(number, dtype=torch.int32), *(each["flag"][1] for each in received.values())])
    return replace(found, frozen=state.spans(acc.frozen, position.shard), agreed=(numbers == number).all())


def _gather_shards(update: Update, state: ShardState, position: Position, memory: Memory) -> Requests[Tensor]:
    """Gather the updates of all shards inside the host. Turn the mean over hosts into the mean over ranks."""
    payload = state.payload(update.flat, None)
    memory.give_back(update)
    shards = yield from _gather_from(position.neighbours, payload, position)
    return torch.cat([shard["values"] for shard in shards])[: state.layout.total].mul_(position.host_world.mean_of_shares)


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
    others = [rank for rank in ranks if rank != position.neighbours[position.shard]]
    received = yield from send(dict.fromkeys(others, payload), others, payload.form, payload.bytes.device)
    return [received.get(rank, payload) for rank in ranks]


class Position(NamedTuple):
    """A rank's position among the hosts.

    neighbours: the ranks of its host, in the order of their shards. shard: the shard that it owns.
    peers: the owners of the same shard, one on each host. peer_world: the world of the peers. hosts: the host of every rank,
    numbered in the order of ranks.
    """

    neighbours: tuple[int, ...]
    shard: int
    peers: tuple[int, ...]
    peer_world: World
    hosts: tuple[int, ...]

    @property
    def host_world(self) -> World:
        """The world of the ranks of this host, in the order of their shards."""
        return World(self.shard, len(self.neighbours))


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
    shard = neighbours.index(world.rank)
    peers = tuple(ranks[shard] for ranks in ranks_of.values())
    numbers = {host: number for number, host in enumerate(ranks_of)}
    return Position(
        tuple(neighbours), shard, peers, World(peers.index(world.rank), len(peers)), tuple(numbers[host] for host in hosts)
    )


class ShardState:
    """The state of this rank's shard of a bucket. move_to() makes it anew whenever the rank's position changes.

    All shards are equally long, so that all ranks yield the same requests. Zeros fill up a last shard that is shorter.
    """

    def __init__(self, layout: Layout, seed: int):
        self.layout, self.seed = layout, seed
        self.position: Position | None = None
        self.saved: Mapping[str, Any] | None = None
        self.inner: Any = None
        self.exchanges = 0  # since the inner state was made
        self.shard_layout = layout
        self.moments: Tensor | None = None

    def move_to(self, inner: Compressor, position: Position) -> None:
        """Make the inner compressor's state if the position changed, and restore a saved state."""
        if position != self.position:
            self.position, self.exchanges = position, 0
            self.shard_layout = self._layout_of(position.shard, len(position.neighbours))
            self.inner = inner.init(self.shard_layout, self.seed)
            if inner.traits.moments:
                layers = len(self.shard_layout.names)
                self.moments = torch.zeros(layers, MOMENTS, dtype=torch.float64, device=self.layout.device)
        self._restore(inner)

    def forget(self) -> None:
        """Make the inner state anew at the next exchange."""
        self.position = self.inner = self.saved = None
        self.exchanges = 0

    @property
    def place(self) -> list[int] | None:
        """Return the number of this rank's shard and then the host of every rank, numbered; None before the first exchange.

        Either all ranks have their old places or none has, so that they restore their states together.
        """
        return None if self.position is None else [self.position.shard, *self.position.hosts]

    def load(self, inner: Compressor, saved: Mapping[str, Any]) -> None:
        """Check a saved state, and restore it as soon as the rank's position is known."""
        read_int(saved, "exchanges")
        if entry(saved, "place") is not None:
            shard, *hosts = place = read_ints(saved, "place") or [0]
            shards = hosts.count(0)  # as many ranks on every host
            check_int(shard, "place", 0, shards - 1)
            own = table_or_empty(saved, "inner")
            if own:
                inner.load(inner.init(self._layout_of(shard, shards), self.seed), own)
            saved = {**saved, "place": place, "inner": own}
        self.saved = dict(saved)
        if self.inner is not None:
            self._restore(inner)

    def _restore(self, inner: Compressor) -> None:
        """Load the saved state into the inner compressor's state, unless the rank has another shard now."""
        if self.saved is None:
            return
        saved, self.saved = self.saved, None
        if saved.get("inner") and saved["place"] == self.place:
            inner.load(self.inner, saved["inner"])
            self.exchanges = saved["exchanges"]

    @property
    def length(self) -> int:
        """Return the number of entries of a shard."""
        assert self.position is not None
        return self._length_of(len(self.position.neighbours))

    @property
    def form(self) -> Form:
        """Return the form of a shard's payload: a flag for what is not finite with the number of frozen entries; entries."""
        return Field("flag", torch.int32, 2), Field("values", torch.float32, self.length)

    def slice(self, flat: Tensor, shard: int) -> Tensor:
        """Slice a shard out of the bucket's flat array. The last one may be shorter than the others, or empty."""
        return flat[shard * self.length : (shard + 1) * self.length]

    def padded(self, flat: Tensor, shard: int) -> Tensor:
        """Return a shard in its full length: a view of the bucket's array, or a copy that ends with zeros."""
        view = self.slice(flat, shard)
        return view if len(view) == self.length else torch.nn.functional.pad(view, (0, self.length - len(view)))

    def spans(self, frozen: Iterable[tuple[int, int]], shard: int) -> tuple[tuple[int, int], ...]:
        """Cut spans of the bucket to those within a shard."""
        first = shard * self.length
        cut = [(max(begin - first, 0), min(end - first, self.length)) for begin, end in frozen]
        return tuple((begin, end) for begin, end in cut if begin < end)

    def payload(self, values: Tensor, flag: Tensor | None, scale: float = 1.0, number: int = 0) -> Payload:
        """Write scale times a shard into a payload. number: of the rank's frozen entries."""
        payload = payloads.empty(self.form, values.device)
        payload["flag"].fill_(number)
        if flag is None:
            payload["flag"][0].zero_()
        else:
            payload["flag"][:1].copy_(flag)
        torch.mul(values, scale, out=payload["values"])
        return payload

    def _length_of(self, shards: int) -> int:
        return -(-self.layout.total // shards)

    def _layout_of(self, shard: int, shards: int) -> Layout:
        """Cut the layers to a shard. The zeros that fill it up become one more layer."""
        length = self._length_of(shards)
        begin = shard * length
        names, sizes = [], []
        for name, (first, end) in zip(self.layout.names, self.layout.spans, strict=True):
            inside = min(end, begin + length) - max(first, begin)
            if inside > 0:
                names.append(name)
                sizes.append(inside)
        if sum(sizes) < length:
            names.append("")
            sizes.append(length - sum(sizes))
        return Layout(tuple(names), tuple(sizes), self.layout.device)
