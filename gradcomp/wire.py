"""Payloads in memory: named arrays laid out one after the other in one byte buffer, so that packing copies nothing."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gradcomp.core import Field, Form, Payload, Send, World

ALIGNMENT = 8
"""Every array, and so every payload in a gathered buffer, begins at a multiple of this many bytes."""


BLOCK = 1 << 16
"""Entries of a block, inside which a place takes 16 bits."""

MOST_EXPONENT = 253


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def size(form: Form) -> int:
    """Bytes of a payload of this form."""
    return sum(_padded(field.length * field.dtype.itemsize) for field in form)


def empty(form: Form, device: torch.device) -> Payload:
    """A payload to be filled in."""
    return read(form, torch.empty(size(form), dtype=torch.uint8, device=device))


def read(form: Form, buffer: Tensor) -> Payload:
    """The payload that lies in this buffer."""
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or buffer.numel() != size(form):
        raise ValueError(
            f"a payload of {size(form)} bytes was expected, but {buffer.numel()} entries of {buffer.dtype} came: "
            "do all ranks run the same gradcomp with the same settings?"
        )
    arrays: dict[str, Tensor] = {}
    at = 0
    for name, dtype, length in form:
        stop = at + length * dtype.itemsize
        arrays[name] = buffer[at:stop].view(dtype)
        at += _padded(stop - at)
    return Payload(form, buffer, arrays)


class Mail(NamedTuple):
    """A send as an alltoall: one buffer, how many of its bytes go to each rank, and how many come from each."""

    outgoing: Tensor
    goes: list[int]
    comes: list[int]


def mail(request: Send, world: World) -> Mail:
    """A rank that has nothing for itself sends itself a word of zeros: no operation is of nothing, in or out."""
    parts, senders, form, device = request
    ranks, word = range(world.size), torch.zeros(ALIGNMENT, dtype=torch.uint8, device=device)
    goes = [size(form) if rank in parts else ALIGNMENT * (rank == world.rank) for rank in ranks]
    comes = [size(form) if rank in senders else ALIGNMENT * (rank == world.rank) for rank in ranks]
    return Mail(torch.cat([parts[rank].bytes if rank in parts else word for rank in ranks if goes[rank]]), goes, comes)


def opened(request: Send, incoming: Tensor, comes: list[int]) -> dict[int, Payload]:
    """What came in an alltoall."""
    came = enumerate(incoming.split(comes))
    return {rank: read(request.form, part) for rank, part in came if rank in request.senders}


def sparse_form(capacity: int) -> Form:
    """wire=exact: values and places of 32 bits each. header: how many wanted to travel; was a gradient not finite?"""
    return (
        Field("header", torch.int32, 2),
        Field("values", torch.float32, capacity),
        Field("indices", torch.int32, capacity),
    )


def packed_form(n: int, capacity: int) -> Form:
    """wire=compact: entries of 32 bits out of n, counted by blocks of 2^16; gradcomp/wire.md says what the bits mean."""
    return (
        Field("header", torch.int32, 2),
        Field("blocks", torch.int32, -(-n // BLOCK)),
        Field("entries", torch.int32, capacity),
    )


def check_sparse(payload: Payload, n: int, sender: str) -> None:
    """Raises where a sparse payload for n entries is malformed: what the kernels answer with NaN gets a sentence."""
    wanted, flag = payload["header"].tolist()
    if wanted < 0 or flag not in (0, 1):
        raise _malformed(sender, f"its header says {wanted} entries and flag {flag}")
    places = payload["indices"][:wanted] if "indices" in payload.arrays else _places(payload, wanted, sender)
    if not ((places >= 0) & (places < n)).all():
        raise _malformed(sender, f"it names places outside the bucket of {n} entries")


def _places(payload: Payload, wanted: int, sender: str) -> Tensor:
    entries = payload["entries"][:wanted]
    counts, exponents = payload["blocks"] & 0xFFFFFF, (payload["blocks"] >> 24) & 0xFF
    if (counts > BLOCK).any() or (exponents > MOST_EXPONENT).any():
        raise _malformed(sender, f"a block holds more than {BLOCK} entries, or its exponent is none")
    if int(counts.sum()) != entries.numel():
        raise _malformed(sender, f"its blocks count {int(counts.sum())} entries, but {entries.numel()} came")
    return torch.repeat_interleave(torch.arange(counts.numel()) * BLOCK, counts.long()) + (entries & 0xFFFF)


def _malformed(sender: str, what: str) -> ValueError:
    return ValueError(f"the payload of {sender} is malformed: {what}; do all ranks run the same gradcomp?")


def whole(array: Tensor) -> Payload:
    """A payload of one array that is there already; it is copied only where its length has to be rounded up."""
    form = (Field("bytes", array.dtype, array.numel()),)
    if array.numel() * array.element_size() % ALIGNMENT == 0:
        return Payload(form, array.view(torch.uint8), {"bytes": array})
    payload = empty(form, array.device)
    payload["bytes"].copy_(array)
    return payload
