"""Sketched-SGD: tables go to one rank, the server; it says which entries are heaviest, gets their exact values, and sends the k
largest sums back.

N. Ivkin, D. Rothchild, E. Ullah, V. Braverman, I. Stoica, R. Arora, "Communication-efficient Distributed SGD with Sketching"
(NeurIPS 2019). With candidates=0 there is one round: the estimates are the update, and every rank keeps the difference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gradcomp.exchanges import server, sketched
from gradcomp.protocol import Acc, Steps
from gradcomp.requests import World


@dataclass(frozen=True)
class SketchedSgd(sketched.Sketching):
    """Rank 0 is the server."""

    def sketched(self, acc: Acc, table: sketched.Table, world: World) -> Steps:
        leads, device, k = world.rank == 0, acc.residual.device, table.sizes.k
        answer = torch.empty(2 * k + 1, device=device)
        total = yield from server.sum_at_server(table.sketch(acc), world)
        if self.candidates:
            asked = torch.empty(table.sizes.candidates, dtype=torch.int32, device=device)
            if leads:
                asked, _ = table.heaviest(total, table.sizes.candidates, acc.memory)
            asked = yield from server.from_server(asked, world)
            total = yield from server.sum_at_server(sketched.values_at(acc, asked), world)
            if leads:
                places, values = sketched.largest(asked, total, k, acc.memory)
                answer = torch.cat([values, places.view(torch.float32)])
        elif leads:
            places, estimates = table.heaviest(total, k, acc.memory)
            answer = torch.cat([estimates, total[-1:], places.view(torch.float32)])
        answer = yield from server.from_server(answer, world)
        return sketched.make_update(acc, answer[k + 1 :].view(torch.int32), answer[: k + 1], world, whole=self.candidates > 0)
