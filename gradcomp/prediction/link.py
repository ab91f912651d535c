"""The time of a message on a link, and of a step: a rank's computing, and the messages that its network carries meanwhile."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gradcomp.core.requests import World
from gradcomp.prediction.recording_network import Bucket, Message, Part

_UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}
_NUMBER = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)"
_RATE = re.compile(rf"\s*({_NUMBER}(?:e[0-9]+)?)\s*([kmgKMG]?)(?:[bB]it(?:/s|ps)?|bps)\s*")  # GBps are bytes
_TIME = re.compile(rf"\s*({_NUMBER}(?:e-?[0-9]+)?)\s*(s|ms|us)\s*", re.IGNORECASE)
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


class Link(NamedTuple):
    """A full-duplex link of each host, and the memory inside a host.

    Attributes:
        bandwidth: Bytes a second between hosts.
        latency: Seconds of a message between hosts.
        inside: Bytes a second within a host.
        latency_inside: Seconds of a message within a host.
    """

    bandwidth: float
    latency: float = 50e-6
    inside: float = 5e9
    latency_inside: float = 10e-6

    def __str__(self) -> str:
        between = f"{8 * self.bandwidth / 1e9:g} Gbit/s, {1e6 * self.latency:g} us between hosts"
        return f"{between}, {8 * self.inside / 1e9:g} Gbit/s, {1e6 * self.latency_inside:g} us inside"

    def seconds(self, message: Message, world: World) -> float:
        """Return the time of an operation in which this rank sends a message, and the others theirs.

        A ring enters and leaves every host once. A send is one message to every rank, after its length.
        """
        if world.size == 1:
            return 0.0
        of_host, rounds, crossing = ranks_of_host(world), world.size - 1, crossing_bytes(message, world)
        if message.kind in RINGS:
            away = of_host < world.size
            latency, bandwidth = (self.latency, self.bandwidth) if away else (self.latency_inside, self.inside)
            return RINGS[message.kind] * rounds * latency + crossing / bandwidth
        near = sum(size for rank, size in message.to.items() if not world.on_other_host(rank))
        waits = 2 * (rounds - of_host + 1) * self.latency + 2 * (of_host - 1) * self.latency_inside
        return waits + crossing / self.bandwidth + near / self.inside


# The rounds of rings, of P - 1 messages each: a reduction sends a P-th in each, a gather a payload.
RINGS = {"reduce": 2, "gather": 1}


def ranks_of_host(world: World) -> int:
    """Return the ranks on this rank's host, itself among them."""
    return 1 if world.hosts is None else world.hosts.count(world.hosts[world.rank])


def crossing_bytes(message: Message, world: World) -> float:
    """Return the bytes that an operation sends through the interface of this rank's host, or receives if that is more."""
    return max(both_ways(message, world))


def both_ways(message: Message, world: World) -> tuple[float, float]:
    """Return the bytes that an operation sends through the interface of this rank's host, and those that it receives.

    Where all ranks are on one host, a ring passes as much between two ranks.
    """
    rounds = world.size - 1
    if message.kind == "reduce":
        return (2 * rounds * message.bytes / world.size,) * 2
    if message.kind == "gather":
        return (float(rounds * message.bytes),) * 2
    out = sum(size for rank, size in message.to.items() if world.on_other_host(rank))
    into = message.bytes_in * sum(map(world.on_other_host, message.senders))
    return ranks_of_host(world) * out, ranks_of_host(world) * into


def bandwidth_of(text: object, of: str) -> float:
    """Read 10Gbit/s, 100Mbit or 1e9bit: bytes a second."""
    match = _RATE.fullmatch(text) if isinstance(text, str) else None
    if match is None or not 0 < float(match[1]) < math.inf:
        raise ValueError(f"{of} {text!r} is not a rate; write for example 10Gbit/s or 100Mbit/s")
    return float(match[1]) * _UNITS[match[2].lower()] / 8


def seconds_of(text: object, of: str) -> float:
    """Read 50us, 1.5ms or 2s."""
    match = _TIME.fullmatch(text) if isinstance(text, str) else None
    if match is None or not float(match[1]) < math.inf:
        raise ValueError(f"{of} {text!r} is not a time; write for example 50us, 12ms or 0.3s")
    return float(match[1]) * _SECONDS[match[2].lower()]


class Work(NamedTuple):
    """The computing of a step without any exchange, in seconds.

    ready: for each layer, the share of backward after which its gradient is ready.
    """

    forward: float
    backward: float
    ready: Mapping[str, float]
    optimizer: float = 0.0


class Step(NamedTuple):
    """A step's seconds: in all, compressing and decompressing, and waiting for messages with nothing else to do."""

    seconds: float
    encoding: float
    waiting: float


class Sharded(NamedTuple):
    """A module of FSDP2. share: of the computing. gather, reduce: its weights, and its gradients to the ranks' parts.

    resharded: after forward, so that backward gathers its weights again.
    """

    share: float
    gather: tuple[Part, ...]
    reduce: tuple[Part, ...]
    resharded: bool = True

    def sent(self, world: World) -> int:
        """Return the bytes that each process sends to the others in a step."""
        messages = [part.message for part in (*self.gather * (1 + self.resharded), *self.reduce) if part.message is not None]
        return sum(each.bytes * (world.size - 1 if each.kind == "gather" else 1) for each in messages)


def step_of(work: Work, buckets: Sequence[Bucket], link: Link, world: World) -> Step:
    """Lay a step out in time.

    A bucket's first message follows its last gradient. The others go round by round after backward, in bucket order. The
    network carries one message after the other. An exchange of updates begins after the optimizer's step.
    """
    if any(bucket.on_updates for bucket in buckets):
        work = Work(work.forward + work.backward + work.optimizer, 0.0, dict.fromkeys(work.ready, 1.0))

    def ready(bucket: Bucket) -> float:
        return max(work.ready[name] for name in bucket.names)

    free = now = work.forward
    done: list[float] = []
    encoding = waiting = 0.0
    filled = sorted(buckets, key=ready)
    for bucket in filled:
        first = bucket.parts[0]
        now = max(now, work.forward + encoding + work.backward * ready(bucket)) + first.seconds
        encoding += first.seconds
        if first.message is not None:
            free = max(free, now) + link.seconds(first.message, world)
        done.append(free)
    now = max(now, work.forward + work.backward + encoding)
    for turn in range(1, max((len(bucket.parts) for bucket in buckets), default=0)):
        for i, bucket in enumerate(filled):
            if turn >= len(bucket.parts):
                continue
            waiting += max(0.0, done[i] - now)
            part = bucket.parts[turn]
            now = max(now, done[i]) + part.seconds
            encoding += part.seconds
            if part.message is not None:
                free = max(free, now) + link.seconds(part.message, world)
                done[i] = free
    return Step(now + work.optimizer, encoding, waiting)


def step_over_shards(work: Work, modules: Sequence[Sharded], link: Link, world: World, overlaps: bool) -> Step:
    """Lay a step of FSDP2 out in time.

    The weights of the next module arrive, and the gradients of the one before leave, while a module computes; without
    `overlaps`, as on a CPU, the rank waits for each message at once. The network carries one message after the other.
    """
    now = free = encoding = waiting = 0.0

    def begin(parts: Sequence[Part]) -> tuple[float, Sequence[Part]]:
        """Do the first part. Return when its message has arrived, and the other parts."""
        nonlocal now, free, encoding
        for part in parts[:1]:
            now, encoding = now + part.seconds, encoding + part.seconds
            if part.message is not None:
                free = max(free, now) + link.seconds(part.message, world)
        return free, parts[1:]

    def end(arrived: float, parts: Sequence[Part]) -> None:
        nonlocal now, waiting
        while parts:
            waiting += max(0.0, arrived - now)
            now = max(now, arrived)
            arrived, parts = begin(parts)

    none: Sequence[Part] = ()
    passes: list[tuple[float, Sequence[Part], Sequence[Part]]] = [
        (work.forward * each.share, each.gather, none) for each in modules
    ]
    passes += [(work.backward * each.share, each.gather if each.resharded else none, each.reduce) for each in modules[::-1]]
    coming, leaving = None, (0.0, none)
    for i, (computing, gather, reduce) in enumerate(passes):
        end(*(coming or begin(gather)))
        # The last module of forward is the first one of backward, and gathers its weights again only then.
        coming = begin(passes[i + 1][1]) if overlaps and i + 1 not in (len(modules), len(passes)) else None
        now += computing
        end(*leaving)
        leaving = begin(reduce)
        if not overlaps:
            end(*leaving)
            leaving = (now, none)
    end(*leaving)
    return Step(now + work.optimizer, encoding, waiting)
