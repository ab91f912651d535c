"""gs-SGD: all ranks sum one count sketch of the whole gradient without a server, then exact values of its heaviest entries.

L. Dai, B. Diao, C. Li, Y. Xu (2021). Only the paper's abstract was available. It names a sketch of the gradient, no server, and
traffic of O(log d log P). The way the parts fit together here is a reconstruction:

    u <- m u + g;  v <- v + u;  S <- sum of all ranks' sketch(v);  C <- the heaviest entries of S, of each part by one rank
    e <- sum of all ranks' v[C];  the k largest of e are the update;  v, u <- 0 there

A round gathers C, unless it is short: then every rank finds all of it. The last round makes the values exact, and with them the
error feedback.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradcomp.core.compressor import Acc, Steps
from gradcomp.core.requests import World, reduce
from gradcomp.exchanges import sketched


@dataclass(frozen=True)
class GsSgd(sketched.Sketcher):
    """Sums tables and values over all ranks, without a server."""

    def indices_sent(self, candidates: int) -> int:
        return sketched.divided(candidates, 2)

    def exchange_sketch(self, acc: Acc, table: sketched.SketchTable, world: World) -> Steps:
        total = yield from reduce(table.sketch(acc, world))
        indices = yield from table.search(total, table.sizes.candidates, acc.memory, world)
        values = yield from reduce(sketched.values_at(acc, indices, world))
        largest = sketched.select_largest(indices, values, table.sizes.k, acc.memory)
        return sketched.make_update(acc, *largest, world)
