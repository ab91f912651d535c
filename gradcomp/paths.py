"""Steps that algorithms share: ways of bringing payloads together into one update."""

from __future__ import annotations

import torch

from gradcomp import kernels, wire
from gradcomp.core import Acc, Field, Form, Gather, Payload, Steps, World


def sparse_form(capacity: int) -> Form:
    """A payload of 32-bit values and 32-bit indices. header: the count, and whether a gradient was not finite."""
    return (
        Field("header", torch.int32, 2),
        Field("values", torch.float32, capacity),
        Field("indices", torch.int32, capacity),
    )


def sparse_payload(acc: Acc, capacity: int) -> Payload:
    """A sparse payload to be filled in, where acc lies."""
    return wire.empty(sparse_form(capacity), acc.value.device)


def sparse_allgather(acc: Acc, payload: Payload, world: World) -> Steps:
    """Everybody's entries to everybody, added up rank by rank: the same sum, in the same order, on all ranks.

    If a rank met a gradient that is not finite, the update is not finite on all ranks and every rank takes its entries back.
    """
    replies = yield Gather(payload)
    update = kernels.zeros(acc.value.numel(), acc.value.device)
    for reply in replies:
        kernels.add_sparse(update, **reply.arrays, scale=1 / world.size)
    kernels.restore_sparse(acc.value, **payload.arrays, update=update)
    return update
