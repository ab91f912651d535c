"""Payloads in memory: named arrays laid out one after the other in one byte buffer, so that packing copies nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from gradcomp.requests import Field, Form, Payload

# Bytes. Every array begins at a multiple of this, and so does every payload in a gathered buffer.
ALIGNMENT = 8


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def size(form: Form) -> int:
    """Return the bytes of a payload of this form."""
    return sum(_padded(field.length * field.dtype.itemsize) for field in form)


def empty(form: Form, device: torch.device) -> Payload:
    """Make a payload with uninitialised arrays."""
    return read(form, torch.empty(size(form), dtype=torch.uint8, device=device))


def read(form: Form, buffer: Tensor) -> Payload:
    """Read a buffer as a payload of this form; nothing is copied."""
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or buffer.numel() != size(form):
        raise ValueError(
            f"received {buffer.numel()} entries of {buffer.dtype} where a payload of {size(form)} bytes was expected; "
            "run the same gradcomp with the same settings on all ranks"
        )
    arrays: dict[str, Tensor] = {}
    begin = 0
    for name, dtype, length, _ in form:
        end = begin + length * dtype.itemsize
        arrays[name] = buffer[begin:end].view(dtype)
        begin += _padded(end - begin)
    return Payload(form, buffer, arrays)


def wrap(array: Tensor) -> Payload:
    """Make a payload of one array. It is copied only if its bytes are not a multiple of the alignment."""
    form = (Field("bytes", array.dtype, array.numel()),)
    if array.numel() * array.element_size() % ALIGNMENT == 0:
        return Payload(form, array.view(torch.uint8), {"bytes": array})
    payload = empty(form, array.device)
    payload["bytes"].copy_(array)
    return payload
