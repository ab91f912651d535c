"""The capacity of a threshold compressor's payload: a host number that all ranks change alike.

The gathered headers tell every rank how many entries wanted to travel on each rank. Every rank copies these counts without
waiting and acts on them eight steps later. So no rank waits for its device, and all ranks agree.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gradcomp.core.requests import Payload
from gradcomp.native.memory import DELAY, HostCopy
from gradcomp.saved import whole, wholes


class Capacity:
    """The capacity of one bucket's payload: at first an expected count, later the largest recent count of any rank."""

    def __init__(self, expected: int, largest: int, fixed: bool = False):
        self.entries = min(expected, largest)
        self.largest = largest
        self.fixed = fixed
        self._copied: deque[HostCopy] = deque()  # counts of the latest steps, still on their way
        self._known: deque[int] = deque(maxlen=DELAY)  # the counts before them

    def observe(self, received: Sequence[Payload]) -> None:
        """Record how many entries wanted to travel, once a step, and adapt the capacity."""
        if self.fixed:
            return
        self._copied.append(HostCopy(torch.stack([payload["header"][:1] for payload in received])))
        if len(self._copied) < DELAY:
            return
        self._known.append(self._copied.popleft().largest())
        wanted = rounded_up(max(self._known))
        if wanted > self.entries or wanted < 0.8 * self.entries:
            self.entries = max(1, min(wanted, self.largest))

    def save(self) -> dict[str, Any]:
        return {
            "entries": self.entries,
            "copied": [counts.largest() for counts in self._copied],
            "known": list(self._known),
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        self.entries = whole(saved, "entries", 1, self.largest)
        copied, known = wholes(saved, "copied"), wholes(saved, "known")
        if len(copied) >= DELAY or len(known) > DELAY:
            raise ValueError(
                f"the capacity in the state waits for {len(copied)} counts and knows {len(known)}, where fewer than {DELAY} "
                f"and at most {DELAY} are possible; the state is damaged; load another one"
            )
        self._copied = deque(HostCopy(torch.tensor([count])) for count in copied)
        self._known = deque(known, maxlen=DELAY)


def rounded_up(count: int) -> int:
    """Round a count up, by at most an eighth, so that the capacity does not change with every count."""
    grain = 1 << max(0, count.bit_length() - 4)
    return -(-count // grain) * grain
