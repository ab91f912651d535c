"""Ranks in threads that choose under auto, on a link that takes time.

Their clocks go on only while a link or a sleep takes time. What else the machine does is not in them.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import threads
import torch
from threads import Rank, StockDoor

from gradcomp import auto
from gradcomp.auto import ODD_CHECKS, Chooser
from gradcomp.core.requests import Request, bytes_of
from gradcomp.networks import Answer
from gradcomp.spec import Auto

# Seconds of an empty message, and of each byte on a slow link and on a fast one. The layer has 4,800 bytes.
LATENCY, SLOW, FAST = 0.3e-3, 4e-6, 1e-9
# Seconds that a step computes, and by how much more on each further rank: what one rank decides alone does not pass.
COMPUTES, MORE = 8e-3, 0.05
# The steps in which a choice is over, and those in which a change of the link must have been seen.
CHOICE, SEEN = 90, (ODD_CHECKS + 1) * 60


# The modules of gradcomp that read the time of a step.
READERS = ("gradcomp.auto", "gradcomp.engine.")


class Clock(threading.local):
    """The clock of the rank whose thread asks, in place of the module `time`."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def perf_counter(self) -> float:
        """Return the seconds of this rank."""
        return self._seconds

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self._seconds += max(0.0, seconds)

    def sleep_until(self, then: float) -> None:
        """Let time pass until then."""
        self.sleep(then - self.perf_counter())

    @contextmanager
    def of(self, rank: Rank) -> Iterator[None]:
        """Let this thread go on with a rank's clock."""
        self._seconds = rank.seconds
        yield
        rank.seconds = self._seconds


CLOCK = Clock()


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let gradcomp read the ranks' clocks."""
    readers = [module for name, module in sys.modules.items() if name.startswith(READERS)]
    for module in readers:
        if getattr(module, "time", None) is time:
            monkeypatch.setattr(module, "time", CLOCK)


class Link:
    """The link of all ranks."""

    def __init__(self, each: float):
        self.each = each

    def under(self, rank: Rank) -> None:
        """Let a rank's messages take their time; and let its network take the part of stock Horovod."""
        network: Any = rank.network
        start = network.start

        def slow(request: Request, name: str) -> Answer:
            began = network.generation.began.setdefault((name, network.made.get(name, 0)), [])
            began.append(CLOCK.perf_counter())
            takes = LATENCY + bytes_of(request) * self.each
            answer = start(request, name)

            def wait() -> Any:
                reply = answer()  # all ranks have begun
                CLOCK.sleep_until(max(began) + takes)
                return reply

            return wait

        network.start, rank.session.door = slow, StockDoor(rank)


def begun(link: Link, loss: str) -> list[Rank]:
    """Make two ranks that choose."""
    ranks = threads.start(2, auto.EXACT.spec)
    for rank in ranks:
        link.under(rank)
        rank.session.turns = Chooser(rank.session, Auto(loss), (torch.float32,))
    return ranks


def train(ranks: list[Rank], steps: int) -> list[dict[str, Any]]:
    """Train for some steps, and return what each rank's chooser says."""

    def of_rank(rank: Rank) -> dict[str, Any]:
        with CLOCK.of(rank):
            for _ in range(steps):
                CLOCK.sleep(COMPUTES * (1 + MORE * ranks.index(rank)))
                rank.step()
        turns = rank.session.turns
        assert isinstance(turns, Chooser)
        return turns.report()

    said = threads.together(ranks, of_rank)
    assert all(isinstance(each, dict) for each in said), said
    agreed = {str([each.get(key) for key in ("way", "choices", "seconds", "cost_seconds")]) for each in said}
    assert len(agreed) == 1, f"the ranks disagree: {said}"
    return said
