"""TernGrad: random rounding to -s, 0 or s, with s the largest magnitude of the group after clipping.

W. Wen, C. Xu, F. Yan, C. Wu, Y. Wang, Y. Chen, H. Li, "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep
Learning" (NeurIPS 2017). It clips at 2.5 standard deviations of the layer; sigmas=0 does not clip.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradcomp.exchanges.quantised import Quantiser, sigmas_knob
from gradcomp.messages.rounding import RoundingRule


@dataclass(frozen=True)
class TernGrad(Quantiser):
    """Rounds at random to three levels. Unbiased without clipping."""

    sigmas: float = sigmas_knob(2.5)

    @property
    def rule(self) -> RoundingRule:
        return RoundingRule("peak", 3, self.group, sent="top")
