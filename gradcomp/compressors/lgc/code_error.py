"""An estimate of the error of codes, from a few signed sums that travel in every step. No rank knows the true update.

Each rank computes sixteen sums of its entries, and sixteen of its coding error, with signs that are drawn once. The ranks
average the sums. In expectation, the squares of the averages add up to the squared norms of the ranks' mean entries and of the
update's error. The quotient of one step is a rough estimate. The average over the last few steps is a good one. A large error
is noticed at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradcomp.saved import tensor

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


class CodeCheck(NamedTuple):
    """The result of checking a step's codes, each a tensor of one entry.

    accepted: the update may be used. failed: a gradient was not finite. mark: 1 if the estimated error was above the
    bound, plus 2 if a rank's learning rate has fallen; phases.py counts the marks.
    """

    accepted: Tensor
    failed: Tensor
    mark: Tensor


class CodeError:
    """The estimated relative error of codes, averaged over the last steps."""

    def __init__(self, bound: float, seed: int, device: torch.device):
        self.bound, self.seed = bound, seed
        self.signs = torch.empty(0, device=device)
        self.squared = torch.ones(1, dtype=torch.float64, device=device)
        self.imbalance = torch.zeros(1, dtype=torch.float64, device=device)

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

    def measure_imbalance(self, summary: Tensor, update: Tensor) -> None:
        """Measure by how much the update and the ranks' errors fail to add up to the ranks' entries."""
        entries, errors = summary.double()[: 2 * SIGNED_SUMS].chunk(2)
        self.imbalance = (_squares(entries - errors - self.sums(update)) / _squares(entries)).sqrt()

    def save(self) -> dict[str, Any]:
        """Copy what a checkpoint must hold."""
        return {"square": self.squared.clone()}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Put back what save() gave."""
        self.squared.copy_(tensor(saved, "square", self.squared.shape))


def _squares(sums: Tensor) -> Tensor:
    """Add up the squares of sums, in a fixed order."""
    total = sums.square()
    while len(total) > 1:
        left, right = total.chunk(2)
        total = left + right
    return total
