"""Linear quantisation, to compare with: levels spread evenly between the ends of a group, by value or by rank.

Which of the two the comparisons of ORQ's paper mean by Linear could not be made out.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradcomp.quantising import Multilevel


@dataclass(frozen=True)
class Linear(Multilevel):
    """Unbiased, unless entries are clipped."""

    levels: int = 5  # 2, 3, 5 or 9
    least = 2
    spacing: str = "minmax"  # even steps of value; quantile = of rank: as many entries between any two levels

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.spacing not in ("minmax", "quantile"):
            raise ValueError(f"linear: spacing must be minmax or quantile, not {self.spacing!r}")

    @property
    def rule(self) -> str:
        return "range" if self.spacing == "minmax" else "quantile"

    @property
    def travels(self) -> str:
        return "ends" if self.spacing == "minmax" else "all"
