"""Scaled signs: of each entry only whether it is below 0; a group's magnitude is the mean of its entries'.

J. Bernstein, Y. Wang, K. Azizzadenesheli, A. Anandkumar, "signSGD: Compressed Optimisation for Non-Convex Problems" (ICML
2018); the scale and the error feedback are those of S. Karimireddy, Q. Rebjock, S. Stich, M. Jaggi (ICML 2019).
"""

from __future__ import annotations

from dataclasses import dataclass

from gradcomp.quantising import Quantising


@dataclass(frozen=True)
class Sign(Quantising):
    """One bit an entry."""

    @property
    def rule(self) -> str:
        return "sign"

    @property
    def drawn(self) -> bool:
        return False

    @property
    def travels(self) -> str:
        return "top"
