"""QSGD: levels spread evenly between minus and plus the group's Euclidean norm, rounded to at random.

D. Alistarh, D. Grubic, J. Li, R. Tomioka, M. Vojnovic, "QSGD: Communication-Efficient SGD via Gradient Quantization and
Encoding" (NeurIPS 2017). Levels are counted on both sides and with 0: five of them are QSGD with two positive ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gradcomp.exchanges.rounded import Quantising, levels_knob
from gradcomp.knobs import knob
from gradcomp.messages.levels import Rule


@dataclass(frozen=True)
class Qsgd(Quantising):
    """Unbiased, unless entries are clipped."""

    levels: int = levels_knob(5)
    norm: str = knob("l2", "of a group: the Euclidean one, or the largest magnitude", choices=("l2", "max"))

    leaves_less: ClassVar[str] = "norm=max, or with more levels"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.norm == "l2" and self.sigmas:
            raise ValueError(f"{self}: sigmas clips at the outer levels, and those of norm=l2 lie further out; set norm=max")

    @property
    def rule(self) -> Rule:
        return Rule("norm" if self.norm == "l2" else "peak", self.levels, self.group, travels="top")
