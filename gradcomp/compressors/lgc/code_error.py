"""How far from the truth an update is that nobody knows the truth of: from a few signed sums, which travel in every step.

Each rank sums up, in sixteen sums and with signs drawn once, what it has and what it is left with. Added over the ranks, the
squares of these sums are in the mean those of the ranks' mean, and of what the update misses of it. One step's quotient is a
rough guess; the last few together are a good one, and what is far off is noticed at once.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

SUMS = 16
SALT = 0x51675
"""So that signs have nothing to do with what others draw from the same seed."""
NOTES = 2 * SUMS + 2
"""Numbers that a rank adds to the ranks' sums."""
NEW = 0.25
"""What the latest step counts for."""
MOST = 16.0
"""A quotient that is larger, or none, counts as this."""
FAIR = 1 - 2 / SUMS
"""What a quotient of as many squares is too large by in the mean."""


class Verdict(NamedTuple):
    """All of one entry: whether an update may be used, whether a gradient was not finite, and what is to be remembered of the
    step: 1 where it was off, 2 more where a rank's learning rate has fallen."""

    good: Tensor
    failed: Tensor
    mark: Tensor


class CodeError:
    """Signed sums, and what they have said lately."""

    def __init__(self, bound: float, seed: int, device: torch.device):
        self.bound, self.seed = bound, seed
        self.signs = torch.empty(0, device=device)
        self.square = torch.ones(1, dtype=torch.float64, device=device)
        self.off = torch.zeros(1, dtype=torch.float64, device=device)

    @property
    def error(self) -> float:
        """Relative, of what codes say of the mean."""
        return math.sqrt(float(self.square))

    def sums(self, values: Tensor) -> Tensor:
        """Sixteen of them, each of every sixteenth value."""
        flat = values.flatten()
        if len(self.signs) != len(flat):
            drawn = torch.rand(len(flat), generator=torch.Generator().manual_seed((SALT + self.seed) % 2**63))
            self.signs = (2 * (drawn < 0.5) - 1).to(flat.device, torch.float32)
        return torch.nn.functional.pad(flat * self.signs, (0, -len(flat) % SUMS)).view(-1, SUMS).sum(0)

    def note(self, has: Tensor, misses: Tensor, flag: Tensor | None, fallen: bool = False) -> Tensor:
        """What a rank adds to the ranks' sums."""
        failed = has.new_zeros(1) if flag is None else flag.float()
        return torch.cat([self.sums(has), self.sums(misses), failed, torch.full_like(failed, fallen)])

    def judge(self, mean: Tensor) -> Verdict:
        """What the ranks' notes say in the mean; the same to the last bit on all ranks."""
        has, misses, flag, fallen = mean.double().split((SUMS, SUMS, 1, 1))
        meant, missed, failed = _squares(has), _squares(misses), flag != 0
        quotient = missed / meant
        quotient = FAIR * torch.where(quotient.isfinite(), quotient, MOST).clamp(max=MOST)
        counts = (meant > 0) & ~failed
        self.square = torch.where(counts, self.square + NEW * (quotient - self.square), self.square)
        held = self.square <= self.bound**2
        return Verdict(held & (counts | (missed == 0)), failed, (counts & ~held) + 2 * (fallen != 0))

    def compare(self, mean: Tensor, update: Tensor) -> None:
        """Notes what an update and what all ranks are left with do not add up to."""
        has, misses = mean.double()[: 2 * SUMS].chunk(2)
        self.off = (_squares(has - misses - self.sums(update)) / _squares(has)).sqrt()

    def save(self) -> dict[str, Any]:
        """Everything, in copies."""
        return {"square": self.square.clone()}

    def load(self, saved: dict[str, Any]) -> None:
        """Puts back what save() gave."""
        self.square.copy_(saved["square"])


def _squares(sums: Tensor) -> Tensor:
    """Their sum, in one certain order."""
    total = sums.square()
    while len(total) > 1:
        left, right = total.chunk(2)
        total = left + right
    return total
