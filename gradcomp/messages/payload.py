"""Payloads in memory: named arrays laid out one after the other in one byte buffer, so that packing copies nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from gradcomp.requests import Field, Form, Payload

ALIGNMENT = 8
"""Every array, and so every payload in a gathered buffer, begins at a multiple of this many bytes."""


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def size(form: Form) -> int:
    """Bytes of a payload of this form."""
    return sum(_padded(field.length * field.dtype.itemsize) for field in form)


def empty(form: Form, device: torch.device) -> Payload:
    """Make a payload to be filled in."""
    return read(form, torch.empty(size(form), dtype=torch.uint8, device=device))


def read(form: Form, buffer: Tensor) -> Payload:
    """Read the payload that lies in this buffer."""
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


def whole(array: Tensor) -> Payload:
    """Make a payload of one array that is there already; it is copied only where its length has to be rounded up."""
    form = (Field("bytes", array.dtype, array.numel()),)
    if array.numel() * array.element_size() % ALIGNMENT == 0:
        return Payload(form, array.view(torch.uint8), {"bytes": array})
    payload = empty(form, array.device)
    payload["bytes"].copy_(array)
    return payload
