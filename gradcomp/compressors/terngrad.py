"""TernGrad: -s, 0 or s, s the largest magnitude of the group after clipping, rounded to at random.

W. Wen, C. Xu, F. Yan, C. Wu, Y. Wang, Y. Chen, H. Li, "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep
Learning" (NeurIPS 2017), which clips at 2.5 standard deviations of the layer: sigmas=0 for none.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradcomp.exchanges.rounded import Quantising, sigmas_knob
from gradcomp.messages.levels import Rule


@dataclass(frozen=True)
class TernGrad(Quantising):
    """Unbiased without clipping."""

    sigmas: float = sigmas_knob(2.5)

    @property
    def rule(self) -> Rule:
        return Rule("peak", 3, self.group, travels="top")
