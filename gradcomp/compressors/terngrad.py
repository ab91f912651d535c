"""TernGrad: -s, 0 or s, s the largest magnitude of the group after clipping, rounded to at random.

W. Wen, C. Xu, F. Yan, C. Wu, Y. Wang, Y. Chen, H. Li, "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep
Learning" (NeurIPS 2017), which clips at 2.5 standard deviations of the layer: sigmas=0 for none.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradcomp.quantising import Quantising


@dataclass(frozen=True)
class TernGrad(Quantising):
    """Unbiased without clipping."""

    sigmas: float = 2.5  # entries count as if they lay within so many standard deviations of 0; 0 = as they are

    @property
    def rule(self) -> str:
        return "peak"

    @property
    def count(self) -> int:
        return 3

    @property
    def travels(self) -> str:
        return "top"
