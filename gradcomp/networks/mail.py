"""A send as an alltoall: one buffer out, one buffer in, and how many of their bytes go to and come from each rank."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from gradcomp.messages import payload
from gradcomp.messages.payload import ALIGNMENT
from gradcomp.requests import Payload, Send, World


class Mail(NamedTuple):
    """What an alltoall is given: the buffer, how many of its bytes go to each rank, and how many come from each."""

    outgoing: Tensor
    goes: list[int]
    comes: list[int]


def mail(request: Send, world: World) -> Mail:
    """Lay a send out. A rank with nothing for itself sends itself a word of zeros: no operation is of nothing, in or out."""
    parts, senders, form, device = request
    ranks, word = range(world.size), torch.zeros(ALIGNMENT, dtype=torch.uint8, device=device)
    goes = [payload.size(form) if rank in parts else ALIGNMENT * (rank == world.rank) for rank in ranks]
    comes = [payload.size(form) if rank in senders else ALIGNMENT * (rank == world.rank) for rank in ranks]
    return Mail(torch.cat([parts[rank].bytes if rank in parts else word for rank in ranks if goes[rank]]), goes, comes)


def opened(request: Send, incoming: Tensor, comes: list[int]) -> dict[int, Payload]:
    """Read what came in an alltoall."""
    came = enumerate(incoming.split(comes))
    return {rank: payload.read(request.form, part) for rank, part in came if rank in request.senders}


def check_senders(request: Send, came: Collection[int], name: str) -> None:
    """Refuse what came from others than were to send here."""
    if {*came} != {*request.senders}:
        raise RuntimeError(
            f"exchange {name}: something was to come from ranks {sorted(request.senders)}, but it came from {sorted(came)}: "
            "are all ranks at the same step?"
        )
