"""The phases of lgc: dense steps, steps in which the autoencoder learns, and steps with codes for as long as these hold.

All ranks change phase in the same step. They count the same steps, and they look at errors that are sums over all ranks. These
errors are copied without waiting and take effect eight steps later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradcomp.native.memory import DELAY, HostCopy
from gradcomp.saved import number, whole, wholes

DENSE, LEARN, CODE = "dense", "learn", "code"
# The latest steps with codes that count, and how many of them may be bad before the autoencoder learns again. Both are large
# because a step is judged by a few random sums.
WINDOW, MOST_BAD_STEPS = 64, 32
# The autoencoder learns again once the learning rate is below this share of its highest value, since the gradients change.
RATE_FALL = 0.5


class Phases:
    """The progress of a bucket from dense steps to codes, and back to learning."""

    def __init__(self, dense: int, learn: int):
        self.learn_steps = learn
        self.remaining = [dense, learn]
        self.steps = self.relearned = 0
        self.highest_rate = 0.0
        self.rate_fell = False
        self._marks: deque[HostCopy] = deque()
        self._bad_steps: deque[int] = deque(maxlen=WINDOW)

    def begin_step(self, rates: tuple[float, ...] | None) -> str:
        """Return the phase of this step, and note whether this rank's learning rate fell. The ranks agree on that later."""
        rate = max(0.0, *rates) if rates else 0.0
        self.highest_rate = max(self.highest_rate, rate) if self.current == CODE else rate
        self.rate_fell = rate < RATE_FALL * self.highest_rate
        return self.current

    def end_step(self, phase: str) -> None:
        """Count a finished step of this phase."""
        self.steps += 1
        if phase != CODE:
            self.remaining[phase == LEARN] -= 1

    @property
    def current(self) -> str:
        """Return the phase of the step under way, or of the next one."""
        return DENSE if self.remaining[0] else LEARN if self.remaining[1] else CODE

    def observe(self, mark: Tensor) -> bool:
        """Record the mark of a step with codes (see CodeCheck).

        Return True if too many steps were bad. The autoencoder then learns again, each time for twice as long.
        """
        self._marks.append(HostCopy(mark))
        if len(self._marks) < DELAY:
            return False
        bad, rate_fell = (self._marks[0].largest() & bit for bit in (1, 2))
        self._marks.popleft()
        self._bad_steps.append(bad)
        if rate_fell:
            self.learn_again()
        if sum(self._bad_steps) <= MOST_BAD_STEPS:
            return False
        self.relearned += 1
        self.learn_again(1 << self.relearned)
        return True

    def learn_again(self, times: int = 1) -> None:
        """Make the next steps learning steps, `times` as many as at first."""
        self.remaining[1] = times * self.learn_steps
        self._marks.clear()
        self._bad_steps.clear()

    def save(self) -> dict[str, Any]:
        """Copy what a checkpoint must hold."""
        return {
            "left": list(self.remaining),
            "steps": self.steps,
            "falls": self.relearned,
            "rate": self.highest_rate,
            "marks": [counts.largest() for counts in self._marks],
            "seen": list(self._bad_steps),
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Put back what save() gave."""
        remaining, marks, seen = wholes(saved, "left"), wholes(saved, "marks"), wholes(saved, "seen")
        if len(remaining) != 2 or len(marks) >= DELAY or len(seen) > WINDOW:
            raise ValueError(
                f"the phases in the state have {len(remaining)} counts of steps left, {len(marks)} marks and {len(seen)} steps "
                f"with codes, where 2, fewer than {DELAY} and at most {WINDOW} are possible: the state "
                "is damaged; load another one"
            )
        self.steps, self.relearned = whole(saved, "steps"), whole(saved, "falls")
        self.highest_rate = number(saved, "rate")
        self.remaining = remaining
        self._marks = deque(HostCopy(torch.tensor([mark])) for mark in marks)
        self._bad_steps = deque(seen, maxlen=WINDOW)
