"""Auto: no compressor, but a choice among them: the fastest that loses no more than allowed, measured in the first steps.

The ranks measure their links, their kernels and the steps themselves, and agree. They stay dense where nothing is
more than 3 % faster, and go back to it where nothing is more than 1 % faster: stock torch or Horovod then exchanges the
gradients. They look again when step times or links change.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradcomp import knobs
from gradcomp.knobs import knob

NAME = "auto"

# What may be lost, from the least to the most.
LOSSES = ("none", "low", "high")


@dataclass(frozen=True)
class Auto:
    """The knobs of auto."""

    loss: str = knob(
        "low",
        "none: rounding to 16 bits; low: random rounding to 9 or 5 levels; high: few entries, with a known optimizer",
        choices=LOSSES,
    )

    def __post_init__(self) -> None:
        knobs.check(self, NAME)

    def __str__(self) -> str:
        return ":".join(filter(None, (NAME, ",".join(knobs.changed(self)))))
