"""Nested data as bytes: dicts with text keys, lists, numbers, texts, None and tensors. Reading them runs no code."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# The first items of lists that stand for something else. A tensor has its type and shape; its bytes follow behind the text.
_TENSOR, _LIST = "tensor", "list"
# Bytes of the text's length, in front of it.
_LENGTH = 8


def write(structure: Any) -> bytes:
    """Write nested data as bytes. Equal data gives equal bytes."""
    arrays: list[bytes] = []

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            array = value.detach().cpu().contiguous()
            arrays.append(array.view(-1).view(torch.uint8).numpy().tobytes())
            return [_TENSOR, str(array.dtype).removeprefix("torch."), list(array.shape)]
        if isinstance(value, Mapping):
            return {str(key): plain(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [_LIST, *(plain(each) for each in value)]
        return value

    text = json.dumps(plain(structure)).encode()
    return len(text).to_bytes(_LENGTH, "little") + text + b"".join(arrays)


def read(data: bytes) -> Any:
    """Read the bytes that write() made. Tuples come back as lists, tensors in main memory."""
    end = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
    rest = [end]

    def full(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: full(each) for key, each in value.items()}
        if not isinstance(value, list):
            return value
        if value[0] == _LIST:
            return [full(each) for each in value[1:]]
        _, name, shape = value
        dtype: torch.dtype = getattr(torch, name)
        begin = rest[0]
        rest[0] += math.prod(shape) * dtype.itemsize
        return (
            torch.frombuffer(bytearray(data[begin : rest[0]]), dtype=dtype).view(shape)
            if math.prod(shape)
            else (torch.empty(shape, dtype=dtype))
        )

    return full(json.loads(data[_LENGTH:end]))
