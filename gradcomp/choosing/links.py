"""The links between the ranks, measured with short and long messages of every kind, inside hosts and between them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from gradcomp.messages import payload as payloads
from gradcomp.networks import Network
from gradcomp.prediction.link import Measured
from gradcomp.prediction.trial import device_wait
from gradcomp.requests import Gather, Reduce, Request, Send, World, bytes_of

# The entries of a long message, at least and at most, and how often each one is sent.
SHORTEST, LONGEST, TIMES = 2**10, 2**18, 3


def measure(network: Network, device: torch.device, entries: int) -> Measured:
    """Measure the links. All ranks call this. entries: of the model; its size bounds that of the long messages."""
    long = min(max(entries // 8, SHORTEST), LONGEST)
    lines = {}
    for kind, request in _requests(network.world, device).items():
        short = min(_times(network, device, kind, request, 1))
        both = statistics.median(_times(network, device, kind, request, long))  # a shaper may let the first one pass
        more = bytes_of(request(long)) - bytes_of(request(1))
        lines[kind] = short, max(0.0, both - short) / max(1, more)
    return Measured(lines)


def probe(network: Network, device: torch.device, entries: int) -> float:
    """Return the time of a long reduction. All ranks call this. entries: of the model; it is a small part of them.

    A short one tells nothing of the rate: it is over within the latency, or within what a shaper lets pass after a pause.
    """
    return _seconds(network, device, "probe", Reduce(torch.zeros(min(LONGEST, max(1, entries // 8)), device=device)))


def _requests(world: World, device: torch.device) -> dict[str, Callable[[int], Request]]:
    """Return a maker of requests for each kind. A rank sends about as much as a reduction of so many entries does, or half."""
    near = [rank for rank in world.others if not world.on_other_host(rank)]
    far = [rank for rank in world.others if world.on_other_host(rank)]
    made: dict[str, Callable[[int], Request]] = {
        "reduce": lambda n: Reduce(torch.zeros(n, device=device)),
        "gather": lambda n: Gather(payloads.wrap(torch.zeros(2 * -(-n // world.size), device=device))),
        "send": lambda n: _send(world.others, -(-n // world.size), device),
    }
    if world.shares_hosts:
        made["near"] = lambda n: _send(near, -(-n // world.size), device)
        made["far"] = lambda n: _send(far, -(-n // world.size), device)
    return made


def _send(ranks: list[int], entries: int, device: torch.device) -> Send:
    payload = payloads.wrap(torch.zeros(2 * -(-entries // 2), device=device))
    return Send(dict.fromkeys(ranks, payload), ranks, payload.form, device)


def _times(network: Network, device: torch.device, kind: str, make: Callable[[int], Request], entries: int) -> list[float]:
    return [_seconds(network, device, f"{kind} {entries}", make(entries)) for _ in range(TIMES)]


def _seconds(network: Network, device: torch.device, name: str, request: Request) -> float:
    wait = device_wait(device)
    wait()  # forward and a part of backward may be under way there
    began = time.perf_counter()
    network.start(request, f"auto.{name}")()
    wait()
    return time.perf_counter() - began
