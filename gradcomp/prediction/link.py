"""The time of a message, from a link's bandwidth and latency."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from gradcomp.core.requests import World
from gradcomp.prediction.recording_network import Message

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

        A reduction is a ring, 2 (P - 1) messages of a P-th each; a gather is a ring of P - 1 payloads. A ring enters and leaves
        every host once. A send is one message to every rank, after its length.
        """
        if world.size == 1:
            return 0.0
        hosts = world.hosts or tuple(range(world.size))
        of_host = hosts.count(hosts[world.rank])
        away = of_host < world.size
        latency, bandwidth = (self.latency, self.bandwidth) if away else (self.latency_inside, self.inside)
        rounds = world.size - 1
        if message.kind == "reduce":
            return 2 * rounds * (latency + message.bytes / world.size / bandwidth)
        if message.kind == "gather":
            return rounds * (latency + message.bytes / bandwidth)
        out = sum(size for rank, size in message.to.items() if world.on_other_host(rank))
        near = sum(message.to.values()) - out
        into = message.bytes_in * sum(map(world.on_other_host, message.senders))
        waits = 2 * (rounds - of_host + 1) * self.latency + 2 * (of_host - 1) * self.latency_inside
        return waits + of_host * max(out, into) / self.bandwidth + near / self.inside


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
