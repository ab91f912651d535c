"""The phases of lgc: dense steps, steps in which the autoencoder learns, and steps with codes while their error is small.

All ranks change phase in the same step. They count the same steps, and they look at errors that are sums over all ranks. These
errors are copied without waiting and take effect eight steps later.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradcomp.native.memory import DELAY, HostCopy
from gradcomp.saved import number, read_int, read_ints, tensor

DENSE, LEARN, CODE = "dense", "learn", "code"
# The latest steps with codes that count, and how many of them may be bad before the autoencoder learns again. Both are large
# because a step is judged by a few random sums.
WINDOW, MOST_BAD_STEPS = 64, 32
# Times that it can learn again: each is twice as long.
MOST_FALLS = 40
# The autoencoder learns again once the learning rate is below this share of its highest value, since the gradients change.
RATE_FALL = 0.5
# The signed sums of a rank's entries.
SIGNED_SUMS = 16
# Added to the seed, so that the signs are independent of other draws from the same seed.
SALT = 0x51675
# Numbers of a rank's summary: two sets of sums, the flag, and whether the learning rate fell.
SUMMARY_LENGTH = 2 * SIGNED_SUMS + 2
# The weight of the latest step in the average.
LATEST_WEIGHT = 0.25
# The largest squared error of a step; an undefined one counts as this.
LARGEST_QUOTIENT = 16.0
# Corrects the expectation of a quotient of two sums of this many squares.
QUOTIENT_CORRECTION = 1 - 2 / SIGNED_SUMS


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
        """Copy the state for a checkpoint."""
        return {
            "left": list(self.remaining),
            "steps": self.steps,
            "falls": self.relearned,
            "rate": self.highest_rate,
            "marks": [counts.largest() for counts in self._marks],
            "seen": list(self._bad_steps),
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Restore the result of save()."""
        self.remaining, marks = read_ints(saved, "left", [2]), read_ints(saved, "marks", range(DELAY))
        self.steps, self.relearned = read_int(saved, "steps"), read_int(saved, "falls", 0, MOST_FALLS)
        self.highest_rate = number(saved, "rate")
        self._marks = deque(HostCopy(torch.tensor([mark])) for mark in marks)
        self._bad_steps = deque(read_ints(saved, "seen", range(WINDOW + 1)), maxlen=WINDOW)


class CodeCheck(NamedTuple):
    """The result of checking a step's codes, each a tensor of one entry.

    accepted: the update may be used. failed: a gradient was not finite. mark: 1 if the estimated error was above the
    bound, plus 2 if a rank's learning rate has fallen.
    """

    accepted: Tensor
    failed: Tensor
    mark: Tensor


class CodeError:
    """The estimated relative error of codes, averaged over the last steps. No rank knows the true update.

    Each rank computes sixteen sums of its entries, and sixteen of its coding error, with signs that are drawn once. The ranks
    average the sums. In expectation, the squares of the averages add up to the squared norms of the ranks' mean entries and of
    the update's error. The quotient of one step is a rough estimate; the average over the last few steps is a good one.
    """

    def __init__(self, bound: float, seed: int, device: torch.device):
        self.bound, self.seed = bound, seed
        self.signs = torch.empty(0, device=device)
        self.squared = torch.ones(1, dtype=torch.float64, device=device)

    @property
    def error(self) -> float:
        """Return the estimated error, relative to the ranks' mean."""
        return math.sqrt(float(self.squared))

    def sums(self, values: Tensor) -> Tensor:
        """Compute the sixteen signed sums; each takes every sixteenth value."""
        flat = values.flatten()
        if len(self.signs) != len(flat):
            drawn = torch.rand(len(flat), generator=torch.Generator().manual_seed((SALT + self.seed) % 2**63))
            self.signs = (2 * (drawn < 0.5) - 1).to(flat.device, torch.float32)
        return torch.nn.functional.pad(flat * self.signs, (0, -len(flat) % SIGNED_SUMS)).view(-1, SIGNED_SUMS).sum(0)

    def summarise(self, entries: Tensor, errors: Tensor, flag: Tensor | None, rate_fell: bool = False) -> Tensor:
        """Summarise this rank's entries and coding errors, to be averaged over the ranks."""
        failed = entries.new_zeros(1) if flag is None else flag.float()
        return torch.cat([self.sums(entries), self.sums(errors), failed, torch.full_like(failed, rate_fell)])

    def check(self, summary: Tensor) -> CodeCheck:
        """Check a step's codes by the ranks' mean summary, and update the estimate. All ranks get the same bits."""
        entries, errors, flag, rate_fell = summary.double().split((SIGNED_SUMS, SIGNED_SUMS, 1, 1))
        squares, missed, failed = _squares(entries), _squares(errors), flag != 0
        quotient = missed / squares
        quotient = torch.where(quotient.isfinite(), quotient, LARGEST_QUOTIENT).clamp(max=LARGEST_QUOTIENT)
        quotient = QUOTIENT_CORRECTION * quotient
        counts = (squares > 0) & ~failed
        self.squared = torch.where(counts, self.squared + LATEST_WEIGHT * (quotient - self.squared), self.squared)
        within = self.squared <= self.bound**2
        return CodeCheck(within & (counts | (missed == 0)), failed, (counts & ~within) + 2 * (rate_fell != 0))

    def save(self) -> dict[str, Any]:
        """Copy the state for a checkpoint."""
        return {"square": self.squared.clone()}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Restore the result of save()."""
        self.squared.copy_(tensor(saved, "square", self.squared.shape).clamp(min=0))


def _squares(sums: Tensor) -> Tensor:
    """Add up the squares of sums, in a fixed order."""
    total = sums.square()
    while len(total) > 1:
        left, right = total.chunk(2)
        total = left + right
    return total
