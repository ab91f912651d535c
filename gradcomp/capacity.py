"""How many entries a threshold compressor's payload has room for: a host number that all ranks change alike.

Every rank sees in the gathered headers how many entries wanted to travel on each rank. The counts are copied without waiting,
and what follows from them holds eight steps later, so that no rank ever waits for its device, and none differs from another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradcomp.core import Payload

DELAY = 8
"""Steps between a count and its effect; also how many counts are looked at."""


class Capacity:
    """The room of one bucket's payload: at first what is expected, then as much as the busiest rank needed lately."""

    def __init__(self, expected: int, most: int, fixed: bool = False):
        self.room = min(expected, most)
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
        if wanted > self.room or wanted < 0.8 * self.room:
            self.room = max(1, min(wanted, self.most))

    def save(self) -> dict[str, Any]:
        return {"room": self.room, "counts": [counts.largest() for counts in self._counts]}

    def load(self, saved: Mapping[str, Any]) -> None:
        self.room = saved["room"]
        self._counts = deque(Counts(torch.tensor([count])) for count in saved["counts"])


class Counts:
    """The counts of one step, on their way to main memory."""

    def __init__(self, counts: Tensor):
        self._event: Any = None
        if counts.is_cuda:
            self._host = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
            self._host.copy_(counts, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = counts.clone()

    def largest(self) -> int:
        if self._event is not None:
            self._event.synchronize()  # steps ago by now
            self._event = None
        return int(self._host.max())


def rounded(count: int) -> int:
    """At most a sixteenth more, so that the room does not change with every count."""
    grain = 1 << max(0, count.bit_length() - 4)
    return -(-count // grain) * grain
