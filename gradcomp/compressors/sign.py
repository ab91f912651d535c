"""Scaled signs: of each entry only whether it is below 0; a group's magnitude is the mean of its entries'.

J. Bernstein, Y. Wang, K. Azizzadenesheli, A. Anandkumar, "signSGD: Compressed Optimisation for Non-Convex Problems" (ICML
2018); the scale and the error feedback are those of S. Karimireddy, Q. Rebjock, S. Stich, M. Jaggi (ICML 2019).
"""

from __future__ import annotations

from dataclasses import dataclass

from gradcomp.exchanges.rounded import Quantising
from gradcomp.messages.levels import Rule


@dataclass(frozen=True)
class Sign(Quantising):
    """One bit an entry."""

    @property
    def rule(self) -> Rule:
        return Rule("sign", 2, self.group, drawn=False, travels="top")
