"""ORQ: random, unbiased rounding to the levels that give each group the smallest error.

A. Xu, Z. Huo, H. Huang, "Optimal Gradient Quantization Condition for Communication-Efficient Distributed Training" (2020).
The best level b between two levels l < r fulfils P(v in [b, r]) (r - l) = E[v - l; v in [l, r]]. The search starts from the
smallest and the largest entry and puts a level into every interval: once for three levels, twice for five, three times for
nine. Five levels, and the levels of a lopsided group, are then refined (csrc/math_levels.h).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gradcomp.exchanges.quantised import Quantiser, levels_knob
from gradcomp.messages.rounding import RoundingRule


@dataclass(frozen=True)
class Orq(Quantiser):
    """Rounds at random to optimal levels. Unbiased, unless entries are clipped."""

    levels: int = levels_knob(3)

    suits: ClassVar[str] = "slow links, without a delay; a nineteenth of the bytes"

    @property
    def rule(self) -> RoundingRule:
        return RoundingRule("optimal", self.levels, self.group)
