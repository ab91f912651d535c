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

from gradcomp import paths, sketches
from gradcomp.core import Acc, Reduce, Steps, World


@dataclass(frozen=True)
class GsSgd(sketches.Sketching):
    """Tables and values are summed up by all ranks together."""

    sum: str = "allreduce"  # how tables are summed: tree sends less on links that are slow to answer, but never over Horovod

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sum not in paths.SUMS:
            raise ValueError(f"gs_sgd: sum must be one of {', '.join(paths.SUMS)}, not {self.sum!r}")

    def sketched(self, acc: Acc, table: sketches.Table, world: World) -> Steps:
        total = yield from paths.sum_over_ranks(table.sketch(acc), world, self.sum)
        if not self.candidates:
            places, estimates = table.find(total, table.sizes.k)
            return sketches.settle(acc, places, torch.cat([estimates, total[-1:]]), world, whole=False)
        places, _ = table.find(total, table.sizes.candidates)
        values = yield Reduce(sketches.values_at(acc, places))
        return sketches.settle(acc, *sketches.largest(places, values, table.sizes.k), world)
