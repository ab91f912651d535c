"""ORQ: for each group the levels that rounding at random errs least with, so that the mean stays what it is.

A. Xu, Z. Huo, H. Huang, "Optimal Gradient Quantization Condition for Communication-Efficient Distributed Training" (2020).
Between two levels l < r the best one, b, has P(v in [b, r]) (r - l) = E[v - l; v in [l, r]]. Beginning with the smallest and
the largest entry, a level is put into every interval, once for three levels, twice for five, three times for nine; five, and
those of a lopsided group, are then refined (csrc/levels.h).
"""

from __future__ import annotations

from dataclasses import dataclass

from gradcomp.exchanges.rounded import Quantising, levels_knob
from gradcomp.messages.levels import Rule


@dataclass(frozen=True)
class Orq(Quantising):
    """Unbiased, unless entries are clipped."""

    levels: int = levels_knob(3)

    @property
    def rule(self) -> Rule:
        return Rule("optimal", self.levels, self.group)
