"""BinGrad: one bit per entry, with the two levels that have the smallest error.

A. Xu, Z. Huo, H. Huang, "Optimal Gradient Quantization Condition for Communication-Efficient Distributed Training" (2020).
form=pb, partially biased: the levels are -b and b, with random rounding between them.
b = E[|v|; |v| > b] has the smallest error. It goes without error feedback, as published: its error is as large as the gradient.
form=b, fully biased: the levels are the means of the entries below and above a threshold. The threshold is the mean, or the
best one, which fulfils Lloyd's conditions.
It is no first choice: with AdamW, or with SGD at a high rate, texts end far above dense at times, and ORQ loses less there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gradcomp.core.compressor import Traits
from gradcomp.exchanges.quantised import Quantiser
from gradcomp.knobs import knob
from gradcomp.messages.rounding import RoundingRule


@dataclass(frozen=True)
class BinGrad(Quantiser):
    """Sends one bit per entry, and the levels of each group."""

    form: str = knob("b", "b: levels are two means, nothing random; pb: levels -b and b, random rounding", choices=("b", "pb"))
    threshold: str = knob("mean", "threshold of form=b: the mean, or lloyd for the smallest error", choices=("mean", "lloyd"))

    @property
    def rule(self) -> RoundingRule:
        if self.form == "pb":
            return RoundingRule("partly", 2, self.group, sent="top")
        return RoundingRule(self.threshold, 2, self.group, stochastic=False)

    @property
    def traits(self) -> Traits:
        return replace(super().traits, fed_back=False)

    @property
    def unbiased(self) -> bool:
        return False
