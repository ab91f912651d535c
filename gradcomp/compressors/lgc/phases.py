"""When a learned code is used: after steps in which all travels and steps in which it is learned, and as long as it holds.

All ranks change phase at the same step: they count the same steps, and the errors that they look at are sums over all ranks,
which are copied without waiting and have their effect eight steps later.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from gradcomp.exchanges.delayed_counts import DELAY, Counts

DENSE, LEARN, CODE = "dense", "learn", "code"
LOOKED_AT, MOST_BAD = 64, 32
"""Steps, and how many of them may be off without anything being learned anew: each is judged by a few sums, and by chance."""
FALLEN = 0.5
"""Where the learning rate has fallen to this part, gradients are others: the code is brought up to date."""


class Phases:
    """Where a bucket is on its way from dense to codes, and back."""

    def __init__(self, dense: int, learn: int):
        self.lengths = dense, learn
        self.left = [dense, learn]
        self.steps = self.falls = 0
        self.rate = 0.0
        self.fallen = False
        self._marks: deque[Counts] = deque()
        self._seen: deque[int] = deque(maxlen=LOOKED_AT)

    def begin_step(self, rates: tuple[float, ...] | None) -> str:
        """The phase of this step; and whether this rank's learning rate has fallen, which the ranks have yet to agree upon."""
        rate = max(rates) if rates else 0.0
        self.rate = max(self.rate, rate) if self.now == CODE else rate
        self.fallen = rate < FALLEN * self.rate
        return self.now

    def end(self, phase: str) -> None:
        """A step of this phase has come to its end."""
        self.steps += 1
        if phase != CODE:
            self.left[phase == LEARN] -= 1

    @property
    def now(self) -> str:
        """The phase of the step to come, or of none but codes."""
        return DENSE if self.left[0] else LEARN if self.left[1] else CODE

    def alike(self) -> str:
        """What ranks must have in common, to ask for the same from the next step on."""
        return f"{self.now}, {self.steps} steps done, {self.left} left, learned anew {self.falls} times"

    def see(self, mark: Tensor) -> bool:
        """Remembers a step with codes. True where too many were off: the code is learned anew, each time for longer."""
        self._marks.append(Counts(mark))
        if len(self._marks) < DELAY:
            return False
        off, fallen = (self._marks[0].largest() & bit for bit in (1, 2))
        self._marks.popleft()
        self._seen.append(off)
        if fallen:
            self.learn_again()
        if sum(self._seen) <= MOST_BAD:
            return False
        self.falls += 1
        self.learn_again(1 << self.falls)
        return True

    def learn_again(self, times: int = 1) -> None:
        """The steps to come are of learning: as many times what it takes at first."""
        self.left[1] = times * self.lengths[1]
        self._marks.clear()
        self._seen.clear()

    def save(self) -> dict[str, Any]:
        """Everything, in copies."""
        return {
            "left": list(self.left),
            "steps": self.steps,
            "falls": self.falls,
            "rate": self.rate,
            "marks": [counts.largest() for counts in self._marks],
            "seen": list(self._seen),
        }

    def load(self, saved: dict[str, Any]) -> None:
        """Puts back what save() gave."""
        self.left, self.steps, self.falls, self.rate = list(saved["left"]), saved["steps"], saved["falls"], saved["rate"]
        self._marks = deque(Counts(torch.tensor([mark])) for mark in saved["marks"])
        self._seen = deque(saved["seen"], maxlen=LOOKED_AT)
