"""Clocks of ranks in threads that go on only while a link or a sleep takes time. What else the machine does is not in them."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from threads import Rank

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
