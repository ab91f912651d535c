"""Exchanges by way of one rank, the server: rank 0."""

from __future__ import annotations

from torch import Tensor

from gradcomp.messages import payload
from gradcomp.requests import Asking, World, send


def sum_at_server(tensor: Tensor, world: World) -> Asking[Tensor]:
    """On rank 0 the sum of all ranks' tensors, added rank by rank; on the others what they sent."""
    whole, leads = payload.whole(tensor), world.rank == 0
    came = yield from send({} if leads else {0: whole}, world.others if leads else (), whole.form, tensor.device)
    for rank in sorted(came):
        tensor = tensor + came[rank]["bytes"]
    return tensor


def from_server(tensor: Tensor, world: World) -> Asking[Tensor]:
    """Rank 0's tensor, on all ranks."""
    whole, leads = payload.whole(tensor), world.rank == 0
    parts = dict.fromkeys(world.others, whole) if leads else {}
    came = yield from send(parts, () if leads else (0,), whole.form, tensor.device)
    return tensor if leads else came[0]["bytes"]
