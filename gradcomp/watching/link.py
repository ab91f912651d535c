"""The link between the ranks: the time of a reduction, measured with a short and a long message."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from gradcomp.core.requests import Reduce
from gradcomp.networks import Network

# The entries of a long message, and how often each one is sent.
LONG, TIMES = 2**18, 2


class Link(NamedTuple):
    """The time of a reduction over all ranks: latency in seconds, and seconds for each byte."""

    latency: float
    per_byte: float

    def seconds(self, size: int, messages: int) -> float:
        """Return the time of reductions of so many bytes, in so many messages."""
        return messages * self.latency + size * self.per_byte


def measure(network: Network) -> Link:
    """Measure the link. All ranks call this."""
    short = min(_reduce(network, 1) for _ in range(TIMES))
    long = min(_reduce(network, LONG) for _ in range(TIMES))
    return Link(short, max(0.0, long - short) / (4 * LONG))


def _reduce(network: Network, entries: int) -> float:
    tensor = torch.zeros(entries)
    began = time.perf_counter()
    network.start(Reduce(tensor), "telemetry's link")()
    return time.perf_counter() - began
