"""Exchanges through one rank, the server: rank 0."""

from __future__ import annotations

from torch import Tensor

from gradcomp.core.requests import Requests, World, send
from gradcomp.messages import payload as payloads


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
