"""Top-k: the entries of largest magnitude travel with their indices; the others stay in the residual.

Aji and Heafield, "Sparse Communication for Distributed Gradient Descent" (EMNLP 2017). With momentum and masking it is the core
of Lin et al., "Deep Gradient Compression" (ICLR 2018). The choice of the largest is exact, per bucket.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from gradcomp.core.compressor import Acc, Compressor, Steps, Traits
from gradcomp.core.requests import World
from gradcomp.exchanges import routes
from gradcomp.messages.sparse import count_of, ratio_knob, wire_knob


@dataclass(frozen=True)
class TopK(Compressor):
    """Sends k = max(1, ceil(ratio * n)) of a bucket's n entries."""

    ratio: float = ratio_knob()
    route: str = routes.route_knob()
    wire: str = wire_knob()

    for_auto: ClassVar[Mapping[str, Sequence[str]]] = {"high": ["topk"]}
    suits: ClassVar[str] = "slow links, any optimizer but ZeRO; a two-hundredth of the bytes"

    @property
    def traits(self) -> Traits:
        return Traits(selects=True, share=self.ratio)

    def ease(self, progress: float) -> TopK:
        return replace(self, ratio=self.ratio**progress)

    def exchange(self, acc: Acc, state: None, world: World) -> Steps:
        k = count_of(self.ratio, acc.residual.numel())
        route = routes.possible(self.route, acc, k, world)
        taken = routes.take(acc, k, self.wire, route)
        return (yield from routes.exchange(acc, taken, world, route))
