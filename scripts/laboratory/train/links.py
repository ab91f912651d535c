"""The links between the ranks, measured with short and long messages of every kind, inside hosts and between them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from gradcomp.core.requests import Gather, Reduce, Request, Send, World, bytes_of
from gradcomp.messages import payload as payloads
from gradcomp.networks import Network
from gradcomp.prediction.link import Measured
from gradcomp.prediction.trial import device_wait

# The entries of a short message, at least, and for each rank: with none for some, a reduction takes fewer steps than usual.
# A long message has so many times as many, at least.
SHORT, SHORT_OF_RANK, LONGER = 2**6, 4, 16


def measure(network: Network, device: torch.device, long: int, times: int) -> Measured:
    """Measure the links. All ranks call this.

    long: the entries of a long message; it has more where that tells nothing. times: how often each message is sent.
    The median counts: a shaper may let the first one pass, and where ranks share cores a message waits for them now and then.
    """
    short = max(SHORT, SHORT_OF_RANK * network.world.size)
    long = max(long, LONGER * short)
    lines = {}
    for kind, request in _requests(network.world, device).items():
        few, many = bytes_of(request(short)), bytes_of(request(long))
        of_short, of_long = (
            statistics.median(_seconds(network, device, f"{kind} {size}", request(size)) for _ in range(times))
            for size in (short, long)
        )
        each = max(0.0, of_long - of_short) / (many - few)
        lines[kind] = max(0.0, of_short - few * each), each
    return Measured(lines)


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


def _seconds(network: Network, device: torch.device, name: str, request: Request) -> float:
    wait = device_wait(device)
    wait()  # something may be under way there
    began = time.perf_counter()
    network.start(request, f"the probe of links, {name}")()
    wait()
    return time.perf_counter() - began
