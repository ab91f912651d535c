"""QSGD: levels spread evenly between minus and plus the group's Euclidean norm, rounded to at random.

D. Alistarh, D. Grubic, J. Li, R. Tomioka, M. Vojnovic, "QSGD: Communication-Efficient SGD via Gradient Quantization and
Encoding" (NeurIPS 2017). Levels are counted on both sides and with 0: five of them are QSGD with two positive ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradcomp.quantising import Multilevel


@dataclass(frozen=True)
class Qsgd(Multilevel):
    """Unbiased, unless entries are clipped."""

    levels: int = 5  # 3, 5 or 9
    norm: str = "l2"  # or max: the largest magnitude in its place

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.norm not in ("l2", "max"):
            raise ValueError(f"qsgd: norm must be l2 or max, not {self.norm!r}")
        if self.norm == "l2" and self.sigmas:
            raise ValueError("qsgd: sigmas clips at the outer levels, and those of norm=l2 lie further out; set norm=max")

    @property
    def rule(self) -> str:
        return "norm" if self.norm == "l2" else "peak"

    @property
    def travels(self) -> str:
        return "top"
