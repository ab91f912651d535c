"""The capacity of a threshold compressor's payload: a host number that all ranks change alike.

The gathered headers tell every rank how many entries wanted to travel on each rank. These counts are copied without waiting and
take effect eight steps later. So no rank waits for its device, and all ranks agree.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gradcomp.exchanges.delayed_counts import DELAY, Counts
from gradcomp.requests import Payload


class Capacity:
    """The capacity of one bucket's payload: at first an expected count, later the largest recent count of any rank."""

    def __init__(self, expected: int, largest: int, fixed: bool = False):
        self.entries = min(expected, largest)
        self.largest = largest
        self.fixed = fixed
        self._counts: deque[Counts] = deque()

    def observe(self, received: Sequence[Payload]) -> None:
        """Record how many entries wanted to travel, once a step, and adapt the capacity."""
        if self.fixed:
            return
        self._counts.append(Counts(torch.stack([payload["header"][:1] for payload in received])))
        if len(self._counts) < DELAY:
            return
        wanted = rounded_up(max(counts.largest() for counts in self._counts))
        self._counts.popleft()
        if wanted > self.entries or wanted < 0.8 * self.entries:
            self.entries = max(1, min(wanted, self.largest))

    def save(self) -> dict[str, Any]:
        return {"entries": self.entries, "counts": [counts.largest() for counts in self._counts]}

    def load(self, saved: Mapping[str, Any]) -> None:
        self.entries = saved["entries"]
        self._counts = deque(Counts(torch.tensor([count])) for count in saved["counts"])


def rounded_up(count: int) -> int:
    """Round a count up, by at most an eighth, so that the capacity does not change with every count."""
    grain = 1 << max(0, count.bit_length() - 4)
    return -(-count // grain) * grain
