"""The layout of a send as an alltoall: one buffer out, one buffer in, and the number of bytes to and from each rank."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from gradcomp.core.requests import Payload, Send, World
from gradcomp.messages import payload
from gradcomp.messages.payload import ALIGNMENT


class Buffers(NamedTuple):
    """The arguments of an alltoall: the buffer to send, its bytes for each rank, and the bytes to receive from each rank."""

    outgoing: Tensor
    bytes_out: list[int]
    bytes_in: list[int]


def pack(request: Send, world: World) -> Buffers:
    """Lay a send out in one buffer.

    A rank that has no payload for itself sends itself a word of zeros, so that no operation is empty, out or in.
    """
    payloads, senders, form, device, _ = request
    ranks, word = range(world.size), torch.zeros(ALIGNMENT, dtype=torch.uint8, device=device)
    bytes_out = [payload.size(form) if rank in payloads else ALIGNMENT * (rank == world.rank) for rank in ranks]
    bytes_in = [payload.size(form) if rank in senders else ALIGNMENT * (rank == world.rank) for rank in ranks]
    outgoing = torch.cat([payloads[rank].bytes if rank in payloads else word for rank in ranks if bytes_out[rank]])
    return Buffers(outgoing, bytes_out, bytes_in)


def unpack(request: Send, incoming: Tensor, bytes_in: list[int]) -> dict[int, Payload]:
    """Read the payloads in the received buffer, by sender."""
    parts = enumerate(incoming.split(bytes_in))
    return {rank: payload.read(request.form, part) for rank, part in parts if rank in request.senders}


def check_senders(request: Send, senders: Collection[int], name: str) -> None:
    """Raise unless exactly the senders that a request names have sent."""
    if {*senders} != {*request.senders}:
        raise RuntimeError(
            f"{name}: expected payloads from ranks {sorted(request.senders)}, got them from "
            f"{sorted(senders)}; check that all ranks are at the same step"
        )
