"""Linear quantisation, to compare with: levels spread evenly between the ends of a group, by value or by rank.

Which of the two the comparisons of ORQ's paper mean by Linear could not be made out.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradcomp.exchanges.rounded import Quantising, levels_knob
from gradcomp.knobs import knob
from gradcomp.messages.levels import Rule

SPACINGS = ("minmax", "quantile")


@dataclass(frozen=True)
class Linear(Quantising):
    """Unbiased, unless entries are clipped."""

    levels: int = levels_knob(5, least=2)
    spacing: str = knob("minmax", "even steps of value, or of rank: as many entries between any two levels", choices=SPACINGS)

    @property
    def rule(self) -> Rule:
        if self.spacing == "minmax":
            return Rule("range", self.levels, self.group, travels="ends")
        return Rule("quantile", self.levels, self.group)
