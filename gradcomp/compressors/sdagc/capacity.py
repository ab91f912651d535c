"""How many entries a threshold compressor's payload has room for: a host number that all ranks change alike.

Every rank sees in the gathered headers how many entries wanted to travel on each rank. The counts are copied without waiting,
and what follows from them holds eight steps later, so that no rank ever waits for its device, and none differs from another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gradcomp.exchanges.delayed_counts import DELAY, Counts
from gradcomp.requests import Payload


class Capacity:
    """The room of one bucket's payload: at first what is expected, then as much as the busiest rank needed lately."""

    def __init__(self, expected: int, most: int, fixed: bool = False):
        self.entries = min(expected, most)
        self.most = most
        self.fixed = fixed
        self._counts: deque[Counts] = deque()

    def see(self, replies: Sequence[Payload]) -> None:
        """Notes how many entries wanted to travel; called once a step."""
        if self.fixed:
            return
        self._counts.append(Counts(torch.stack([reply["header"][:1] for reply in replies])))
        if len(self._counts) < DELAY:
            return
        wanted = rounded(max(counts.largest() for counts in self._counts))
        self._counts.popleft()
        if wanted > self.entries or wanted < 0.8 * self.entries:
            self.entries = max(1, min(wanted, self.most))

    def save(self) -> dict[str, Any]:
        return {"entries": self.entries, "counts": [counts.largest() for counts in self._counts]}

    def load(self, saved: Mapping[str, Any]) -> None:
        self.entries = saved["entries"]
        self._counts = deque(Counts(torch.tensor([count])) for count in saved["counts"])


def rounded(count: int) -> int:
    """At most a sixteenth more, so that the room does not change with every count."""
    grain = 1 << max(0, count.bit_length() - 4)
    return -(-count // grain) * grain
