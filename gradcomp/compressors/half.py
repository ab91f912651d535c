"""Half precision: every entry is sent in 16 bits. DDP's and Horovod's own hooks do so, too; here sums have 32 bits.

The ranks round their entries, one rank adds each part up in float32, and the sums are rounded once. A ring that adds in 16 bits
rounds at every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from gradcomp.core.compressor import Traits
from gradcomp.exchanges.rounded import Rounded, route_knob
from gradcomp.knobs import knob
from gradcomp.messages.rounding import HALF_TYPES, HalfRounding


@dataclass(frozen=True)
class Half(Rounded):
    """Sends every entry, rounded to 16 bits."""

    form: str = knob(
        "bf16", "bf16: float32's range and 8 bits; fp16: 11 bits, and entries above 65,504 overflow", choices=[*HALF_TYPES]
    )
    route: str = route_knob()

    for_auto: ClassVar[Mapping[str, Sequence[str]]] = {"none": ["half"]}
    known_as: ClassVar[Mapping[str, str]] = {"fp16": "half:form=fp16", "bf16": "half"}

    # Entries of a part are a multiple of this, so that its bytes are aligned.
    group = 64
    may_round_twice = True

    @property
    def traits(self) -> Traits:
        return Traits(exact=True, fed_back=False)

    def rounding(self, n: int) -> HalfRounding:
        return HalfRounding(self.form, n)
