"""QSGD: random rounding to levels spread evenly between minus and plus the group's Euclidean norm.

D. Alistarh, D. Grubic, J. Li, R. Tomioka, M. Vojnovic, "QSGD: Communication-Efficient SGD via Gradient Quantization and
Encoding" (NeurIPS 2017). The knob counts the levels on both sides and 0: levels=5 is QSGD with two positive levels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gradcomp.exchanges.quantised import Quantiser, levels_knob
from gradcomp.knobs import knob
from gradcomp.messages.rounding import RoundingRule


@dataclass(frozen=True)
class Qsgd(Quantiser):
    """Rounds at random to evenly spaced fractions of a group's norm. Unbiased, unless entries are clipped."""

    levels: int = levels_knob(5)
    norm: str = knob("l2", "a group's outer level: its Euclidean norm, or its largest magnitude", choices=("l2", "max"))

    remedy: ClassVar[str] = "norm=max"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.norm == "l2" and self.sigmas:
            raise ValueError(f"{self}: norm=l2 has outer levels beyond the clipping bounds, so sigmas is useless; set norm=max")

    @property
    def rule(self) -> RoundingRule:
        return RoundingRule("norm" if self.norm == "l2" else "peak", self.levels, self.group, sent="top")
