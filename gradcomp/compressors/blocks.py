"""Blocks: entries in groups of 32 with a scale each, in about five bits. Groups with larger entries get more of the bits.

Every entry travels in every step, and the error is far below the noise of a gradient: nothing waits, and no optimizer needs to
know. An entry 30 times smaller than the largest of its group becomes 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from gradcomp.core.compressor import Traits
from gradcomp.exchanges.rounded import Rounded, route_knob
from gradcomp.knobs import knob
from gradcomp.messages.rounding import BlockRounding


@dataclass(frozen=True)
class Blocks(Rounded):
    """Sends every entry, rounded to a few bits."""

    bits: int = knob(5, "bits of an entry, on average over a block; a quarter of a bit more for scales", least=2, most=8)
    route: str = route_knob()

    group = 32
    may_round_twice = True
    for_auto: ClassVar[Mapping[str, Sequence[str]]] = {"low": ["blocks"]}
    suits: ClassVar[str] = "any training; a sixth of the bytes, at next to no loss"

    @property
    def traits(self) -> Traits:
        return Traits(exact=True, fed_back=False)

    def rounding(self, n: int) -> BlockRounding:
        return BlockRounding(self.bits, n)
