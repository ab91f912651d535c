"""Payloads in memory: named arrays laid out one after the other in one byte buffer, so that packing copies nothing."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from gradcomp.core.requests import Field, Form, Payload

# Bytes. Every array begins at a multiple of this, and so does every payload in a gathered buffer.
ALIGNMENT = 8


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@functools.lru_cache(maxsize=1024)
def size(form: Form) -> int:
    """Return the bytes of a payload of this form."""
    return sum(_padded(field.length * field.dtype.itemsize) for field in form)


class Views(Mapping[str, Tensor]):
    """The arrays of a buffer, by name. Each is made when it is asked for: most kernels take whole buffers."""

    def __init__(self, form: Form, buffer: Tensor):
        self._form, self._buffer = form, buffer
        self._made: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        made = self._made.get(name)
        return self._make(name) if made is None else made

    def _make(self, wanted: str) -> Tensor:
        begin = 0
        for name, dtype, length, _ in self._form:
            end = begin + length * dtype.itemsize
            if name == wanted:
                return self._made.setdefault(name, self._buffer[begin:end].view(dtype))
            begin += _padded(end - begin)
        raise KeyError(wanted)

    def __iter__(self) -> Iterator[str]:
        return (field.name for field in self._form)

    def __len__(self) -> int:
        return len(self._form)


def empty(form: Form, device: torch.device) -> Payload:
    """Make a payload with uninitialised arrays."""
    buffer = torch.empty(size(form), dtype=torch.uint8, device=device)
    return Payload(form, buffer, Views(form, buffer))


def read(form: Form, buffer: Tensor) -> Payload:
    """Read a buffer as a payload of this form; nothing is copied."""
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or buffer.numel() != size(form):
        raise ValueError(
            f"received {buffer.numel()} entries of {buffer.dtype} where a payload of {size(form)} bytes was expected; "
            "run the same gradcomp with the same settings on all ranks"
        )
    return Payload(form, buffer, Views(form, buffer))


def read_all(form: Form, buffer: Tensor, sizes: Sequence[int]) -> list[Payload]:
    """Read a buffer of several ranks' payloads of one form; nothing is copied."""
    return [Payload(form, part, Views(form, part)) for part in buffer.split_with_sizes([*sizes])]


def wrap(array: Tensor) -> Payload:
    """Make a payload of one array. It is copied only if its bytes are not a multiple of the alignment."""
    form = (Field("bytes", array.dtype, array.numel()),)
    if array.numel() * array.element_size() % ALIGNMENT == 0:
        return Payload(form, array.view(torch.uint8), {"bytes": array})
    payload = empty(form, array.device)
    payload["bytes"].copy_(array)
    return payload
