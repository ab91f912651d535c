"""Sketched-SGD: tables go to one rank, the server; it says which entries are heaviest, gets their exact values, and sends the k
largest sums back.

N. Ivkin, D. Rothchild, E. Ullah, V. Braverman, I. Stoica, R. Arora, "Communication-efficient Distributed SGD with Sketching"
(NeurIPS 2019). With candidates=0 there is one round: the estimates are the update, and every rank keeps the difference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gradcomp import paths, sketches
from gradcomp.core import Acc, Steps, World


@dataclass(frozen=True)
class SketchedSgd(sketches.Sketching):
    """Rank 0 is the server."""

    def sketched(self, acc: Acc, table: sketches.Table, world: World) -> Steps:
        server, device, k = world.rank == 0, acc.value.device, table.sizes.k
        answer = torch.empty(2 * k + 1, device=device)
        total = yield from paths.sum_at_server(table.sketch(acc), world)
        if self.candidates:
            asked = torch.empty(table.sizes.candidates, dtype=torch.int32, device=device)
            if server:
                asked, _ = table.find(total, table.sizes.candidates)
            asked = yield from paths.from_server(asked, world)
            total = yield from paths.sum_at_server(sketches.values_at(acc, asked), world)
            if server:
                places, values = sketches.largest(asked, total, k)
                answer = torch.cat([values, places.view(torch.float32)])
        elif server:
            places, estimates = table.find(total, k)
            answer = torch.cat([estimates, total[-1:], places.view(torch.float32)])
        answer = yield from paths.from_server(answer, world)
        return sketches.settle(acc, answer[k + 1 :].view(torch.int32), answer[: k + 1], world, whole=self.candidates > 0)
