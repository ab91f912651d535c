"""Sketched-SGD: a server sums all ranks' tables, then exact values of the heaviest entries, and returns the k largest sums.

N. Ivkin, D. Rothchild, E. Ullah, V. Braverman, I. Stoica, R. Arora, "Communication-efficient Distributed SGD with Sketching"
(NeurIPS 2019).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradcomp.core.compressor import Acc, Steps
from gradcomp.core.requests import Requests, World, send
from gradcomp.exchanges import sketched
from gradcomp.messages import payload as payloads
from gradcomp.messages.sparse import check_indices


@dataclass(frozen=True)
class SketchedSgd(sketched.Sketcher):
    """Sums tables and values at rank 0, the server."""

    def exchange_sketch(self, acc: Acc, table: sketched.SketchTable, world: World) -> Steps:
        serves, device, k = world.rank == 0, acc.residual.device, table.sizes.k
        total = yield from sum_at_server(table.sketch(acc, world), world)
        candidates = torch.empty(table.sizes.candidates, dtype=torch.int32, device=device)
        if serves:
            candidates = table.heaviest(total, table.sizes.candidates, acc.memory)
        candidates = yield from from_server(candidates, world)
        check_indices(candidates, table.n, "rank 0")
        total = yield from sum_at_server(sketched.values_at(acc, candidates, world), world)
        result = torch.empty(2 * k + 1, device=device)
        if serves:
            indices, values = sketched.select_largest(candidates, total, k, acc.memory)
            result = torch.cat([values, indices.view(torch.float32)])
        result = yield from from_server(result, world)
        indices = result[k + 1 :].view(torch.int32)
        check_indices(indices, table.n, "rank 0")
        return sketched.make_update(acc, indices, result[: k + 1], world)


def sum_at_server(tensor: Tensor, world: World) -> Requests[Tensor]:
    """Sum all ranks' tensors on rank 0, rank by rank. The other ranks get their own tensor back."""
    payload, serves = payloads.wrap(tensor), world.rank == 0
    received = yield from send({} if serves else {0: payload}, world.others if serves else (), payload.form, tensor.device)
    for rank in sorted(received):
        tensor = tensor + received[rank]["bytes"]
    return tensor


def from_server(tensor: Tensor, world: World) -> Requests[Tensor]:
    """Send rank 0's tensor to all ranks. The other ranks pass a tensor of the same shape and type."""
    payload, serves = payloads.wrap(tensor), world.rank == 0
    sent = dict.fromkeys(world.others, payload) if serves else {}
    received = yield from send(sent, () if serves else (0,), payload.form, tensor.device)
    return tensor if serves else received[0]["bytes"]
