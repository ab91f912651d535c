"""BinGrad: one bit an entry, with the two levels that err least.

A. Xu, Z. Huo, H. Huang, "Optimal Gradient Quantization Condition for Communication-Efficient Distributed Training" (2020).
pb, partially biased: levels -b and b, between which is rounded at random; b = E[|v|; |v| > b] errs least. b, fully biased: the
means of what lies below and above a threshold, which is the mean, or the best there is, where Lloyd's conditions hold.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradcomp.quantising import Quantising


@dataclass(frozen=True)
class BinGrad(Quantising):
    """One bit an entry."""

    form: str = "b"  # b: both levels are means, nothing is drawn; pb: levels -b and b, between which entries are drawn
    threshold: str = "mean"  # of form=b: the mean, or lloyd, where errors are smallest

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.form not in ("b", "pb"):
            raise ValueError(f"bingrad: form must be b or pb, not {self.form!r}")
        if self.threshold not in ("mean", "lloyd"):
            raise ValueError(f"bingrad: threshold must be mean or lloyd, not {self.threshold!r}")

    @property
    def rule(self) -> str:
        return "partly" if self.form == "pb" else self.threshold

    @property
    def drawn(self) -> bool:
        return self.form == "pb"

    @property
    def travels(self) -> str:
        return "top" if self.form == "pb" else "all"

    @property
    def unbiased(self) -> bool:
        return False
