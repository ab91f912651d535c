"""The ways to exchange gradients among which auto chooses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

import torch

from gradcomp.auto import LOSSES
from gradcomp.prediction import peers
from gradcomp.spec import kind_of, make, names


class Way(NamedTuple):
    """A way to exchange gradients.

    spec: of the compressor, in canonical form. stock: the widest type in which stock torch or Horovod exchanges the gradients
    in the compressor's place; wider ones are cast.
    """

    spec: str
    stock: torch.dtype | None = None

    def __str__(self) -> str:
        if self.stock is None:
            rest, *others = self.specs
            layers = Counter(others)
            return "; ".join([rest, *(f"{spec} in {count} layers" for spec, count in layers.items())])
        return peers.STOCK if self.stock is torch.float32 else f"{peers.STOCK} in {self.tried_as}"

    @property
    def tried_as(self) -> str:
        """The name under which its step is predicted."""
        if self.stock is None:
            return self.spec
        return next((name for name, form in peers.HALVES.items() if form is self.stock), peers.STOCK)

    @property
    def specs(self) -> list[str]:
        """The specs of a mixed way's groups of layers, or the way's own."""
        rest, *rules = self.spec.split("; ")
        return [rest, *(rule.partition("=")[2] for rule in rules)]

    @property
    def is_mixed(self) -> bool:
        """True if groups of layers have different specs."""
        return ";" in self.spec

    @property
    def keeps(self) -> bool:
        """True if entries wait in a residual, which must be sent before another way can follow that has none.

        Rules for layers are made of ways without one.
        """
        return not self.is_mixed and make(self.spec).traits.fed_back


# The way of the first steps, in which everything is seen, and the one that users have without gradcomp.
EXACT = "dense"
FIRST = Way(EXACT)
STOCK = Way(EXACT, torch.float32)
# The way that sends all that waits in a residual, in one step. Like all ways with error feedback it takes the momentum over.
SENDS_ALL = Way("dense:feedback=true")


def ways(loss: str, stock: Collection[torch.dtype], shared_hosts: bool, optimizer_known: bool) -> list[Way]:
    """List the ways, from the one that loses least.

    stock: the types in which the stock framework can exchange the model's gradients; none if it cannot. shared_hosts: all hosts
    have equally many ranks, and several. optimizer_known: its momentum can be taken over, without which what waits in a
    residual costs accuracy.
    """
    found = [way for way in (STOCK, Way(EXACT, torch.bfloat16)) if way.stock in stock] or [FIRST]
    for each in LOSSES[: LOSSES.index(loss) + 1]:
        plain = [spec for name in names() for spec in kind_of(name).for_auto.get(each, ())]
        between = shared_hosts and each != LOSSES[0]
        # Between hosts, ranks compress what they have added up: a way loses no more than the same one between ranks.
        specs = [own for spec in plain for own in ([_by_host(spec), spec] if between else [spec])]
        allowed = [Way(str(make(spec))) for spec in specs]
        found += sorted([way for way in allowed if optimizer_known or not way.keeps], key=lambda way: way.keeps)
    return found


def _by_host(spec: str) -> str:
    return f"{spec}{',' if ':' in spec else ':'}by_host=true"
