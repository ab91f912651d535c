"""Scaled signs: one bit per entry for its sign; a group's magnitude is the mean magnitude of its entries.

J. Bernstein, Y. Wang, K. Azizzadenesheli, A. Anandkumar, "signSGD: Compressed Optimisation for Non-Convex Problems" (ICML
2018). The scale and the error feedback follow S. Karimireddy, Q. Rebjock, S. Stich, M. Jaggi (ICML 2019).
"""

from __future__ import annotations

from dataclasses import dataclass

from gradcomp.exchanges.quantised import Quantiser
from gradcomp.messages.rounding import RoundingRule


@dataclass(frozen=True)
class Sign(Quantiser):
    """Sends signs, and one magnitude a group."""

    @property
    def rule(self) -> RoundingRule:
        return RoundingRule("sign", 2, self.group, stochastic=False, sent="top")
