"""BinGrad: one bit an entry, with the two levels that err least.

A. Xu, Z. Huo, H. Huang, "Optimal Gradient Quantization Condition for Communication-Efficient Distributed Training" (2020).
pb, partially biased: levels -b and b, between which is rounded at random; b = E[|v|; |v| > b] errs least. b, fully biased: the
means of what lies below and above a threshold, which is the mean, or the best there is, where Lloyd's conditions hold.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gradcomp.exchanges.rounded import Quantising
from gradcomp.knobs import knob
from gradcomp.messages.levels import Rule
from gradcomp.protocol import Traits


@dataclass(frozen=True)
class BinGrad(Quantising):
    """One bit an entry."""

    form: str = knob("b", "b: both levels are means, nothing is drawn; pb: levels -b and b, drawn between", choices=("b", "pb"))
    threshold: str = knob("mean", "of form=b: lloyd is where errors are smallest", choices=("mean", "lloyd"))

    @property
    def rule(self) -> Rule:
        if self.form == "pb":
            return Rule("partly", 2, self.group, travels="top")
        return Rule(self.threshold, 2, self.group, drawn=False)

    @property
    def traits(self) -> Traits:
        return replace(super().traits, unbiased=False)
