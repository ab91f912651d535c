"""gs-SGD: one count sketch of the whole gradient, summed over the ranks without a server; then exact values of what it shows.

X. Dai, X. Diao, Y. Li, C. Xu (2021), of whose paper only the abstract could be read: a sketch of the gradient, no server, and
traffic of O(log d log P). How the parts fit together here is reconstructed:

    u <- m u + g;  v <- v + u;  S <- sum of all ranks' sketch(v);  C <- the heaviest entries of S, on every rank the same ones
    e <- sum of all ranks' v[C];  the k largest of e are the update;  v, u <- 0 there

The second round makes the values, and with them the error feedback, exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gradcomp.exchanges import dense, sketched
from gradcomp.knobs import knob
from gradcomp.protocol import Acc, Steps
from gradcomp.requests import World, reduce


@dataclass(frozen=True)
class GsSgd(sketched.Sketching):
    """Tables and values are summed up by all ranks together."""

    sum: str = knob("allreduce", "how tables are summed: tree, as published, is never faster over Horovod", choices=dense.SUMS)

    def sketched(self, acc: Acc, table: sketched.Table, world: World) -> Steps:
        total = yield from dense.sum_over_ranks(table.sketch(acc), world, self.sum)
        if not self.candidates:
            places, estimates = table.heaviest(total, table.sizes.k, acc.memory)
            return sketched.make_update(acc, places, torch.cat([estimates, total[-1:]]), world, whole=False)
        places, _ = table.heaviest(total, table.sizes.candidates, acc.memory)
        values = yield from reduce(sketched.values_at(acc, places))
        return sketched.make_update(acc, *sketched.largest(places, values, table.sizes.k, acc.memory), world)
