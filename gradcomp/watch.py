"""How far from the truth an update is that nobody knows the truth of: from a few signed sums, which travel in every step.

Each rank sums up, in sixteen sums and with signs drawn once, what it has and what it is left with. Added over the ranks, the
squares of these sums are in the mean those of the ranks' mean, and of what the update misses of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

SUMS = 16
SALT = 0x51675
"""So that signs have nothing to do with what others draw from the same seed."""
NOTES = 2 * SUMS + 1
"""Numbers that a rank adds to the ranks' sums."""
WORST = 2.0
"""Times the bound: where an error seems larger than that, the update is not used at all."""


class Verdict(NamedTuple):
    """All of one entry: whether an update may be used, whether it is off, and whether a gradient was not finite."""

    good: Tensor
    bad: Tensor
    failed: Tensor


class Watch:
    """Signed sums, and what they said in the last step."""

    def __init__(self, bound: float, seed: int, device: torch.device):
        self.bound, self.seed = bound, seed
        self.signs = torch.empty(0, device=device)
        self.error = self.off = torch.zeros(1, device=device)

    def sums(self, values: Tensor) -> Tensor:
        """Sixteen of them, each of every sixteenth value."""
        flat = values.flatten()
        if len(self.signs) != len(flat):
            drawn = torch.rand(len(flat), generator=torch.Generator().manual_seed(SALT + self.seed))
            self.signs = (2 * (drawn < 0.5) - 1).to(flat.device, torch.float32)
        return torch.nn.functional.pad(flat * self.signs, (0, -len(flat) % SUMS)).view(-1, SUMS).sum(0)

    def note(self, has: Tensor, misses: Tensor, flag: Tensor | None) -> Tensor:
        """What a rank adds to the ranks' sums."""
        failed = has.new_zeros(1) if flag is None else flag.float()
        return torch.cat([self.sums(has), self.sums(misses), failed])

    def judge(self, mean: Tensor, update: Tensor, always: bool = False) -> Verdict:
        """What the ranks' notes say in the mean, of an update that all of them know; the same to the last bit on all ranks.
        always: it is good whatever they say."""
        has, misses, flag = mean.split((SUMS, SUMS, 1))
        meant, missed = _squares(has), _squares(misses)
        good, failed = (missed <= (WORST * self.bound) ** 2 * meant) | always, flag != 0
        self.error = (missed / meant).sqrt()
        self.off = (_squares(has - misses - self.sums(update)) / meant).sqrt() * (not always)
        return Verdict(good, ~(missed <= self.bound**2 * meant) & (meant > 0) & ~failed, failed)


def _squares(sums: Tensor) -> Tensor:
    """Their sum, in one certain order."""
    total = sums.square()
    while len(total) > 1:
        left, right = total.chunk(2)
        total = left + right
    return total
