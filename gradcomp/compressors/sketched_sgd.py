"""Sketched-SGD: a server sums all ranks' tables, then exact values of the heaviest entries, and returns the k largest sums.

N. Ivkin, D. Rothchild, E. Ullah, V. Braverman, I. Stoica, R. Arora, "Communication-efficient Distributed SGD with Sketching"
(NeurIPS 2019).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gradcomp.core.compressor import Acc, Steps
from gradcomp.core.requests import World
from gradcomp.exchanges import server, sketched
from gradcomp.messages.codec import check_places


@dataclass(frozen=True)
class SketchedSgd(sketched.Sketcher):
    """Sums tables and values at rank 0, the server."""

    def exchange_sketch(self, acc: Acc, table: sketched.SketchTable, world: World) -> Steps:
        serves, device, k = world.rank == 0, acc.residual.device, table.sizes.k
        total = yield from server.sum_at_server(table.sketch(acc, world), world)
        candidates = torch.empty(table.sizes.candidates, dtype=torch.int32, device=device)
        if serves:
            candidates = table.heaviest(total, table.sizes.candidates, acc.memory)
        candidates = yield from server.from_server(candidates, world)
        check_places(candidates, table.n, "rank 0")
        total = yield from server.sum_at_server(sketched.values_at(acc, candidates, world), world)
        result = torch.empty(2 * k + 1, device=device)
        if serves:
            places, values = sketched.select_largest(candidates, total, k, acc.memory)
            result = torch.cat([values, places.view(torch.float32)])
        result = yield from server.from_server(result, world)
        places = result[k + 1 :].view(torch.int32)
        check_places(places, table.n, "rank 0")
        return sketched.make_update(acc, places, result[: k + 1], world)
