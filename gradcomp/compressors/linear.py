"""Linear quantization, a baseline: levels spread evenly between the ends of a group, by value or by rank.

The ORQ paper compares with "Linear", but does not tell which of the two it means.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradcomp.exchanges.quantised import Quantiser, levels_knob
from gradcomp.knobs import knob
from gradcomp.messages.rounding import RoundingRule

SPACINGS = ("minmax", "quantile")


@dataclass(frozen=True)
class Linear(Quantiser):
    """Rounds at random to evenly spread levels. Unbiased, unless entries are clipped."""

    levels: int = levels_knob(5, least=2)
    spacing: str = knob("minmax", "minmax: equal steps of value; quantile: equal counts between levels", choices=SPACINGS)

    @property
    def rule(self) -> RoundingRule:
        if self.spacing == "minmax":
            return RoundingRule("range", self.levels, self.group, sent="ends")
        return RoundingRule("quantile", self.levels, self.group)
