"""Illegal arguments: a legal call with one or two of its arguments changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from fuzz.call import KERNELS
from fuzz.drawn import Draw, Lent

NUMBERS = (0, 1, -1, 2, 63, 2**16, 2**31 - 2, 2**31 - 1, 2**31, 2**32 + 1, 2**62, 2**63 - 1, -(2**31), -(2**63))
NO_NUMBERS = (2**63, -(2**63) - 1, 2**100, 1.5, float("nan"), float("inf"), None, "3", b"3", [1], torch.ones(2), ...)
# A search of two billion entries is legal, and takes a minute.
SLOW = {("heaviest", "n"), ("heaviest", "part"), ("heaviest", "parts")}


class OnGpu:
    """An array that says that it lies on a GPU; a number of one that does not exist, or a wrong capsule."""

    def __init__(self, lent: Lent, device: Any):
        self._lent, self._device = lent, device

    def __dlpack_device__(self) -> Any:
        return self._device

    def __dlpack__(self, stream: int | None = None) -> Any:
        return self._lent.now.__dlpack__() if self._device == (2, 0) else 7


def spoil(draw: Draw, kernel: str, values: dict[str, Any]) -> dict[str, Any]:
    """Change an argument or two."""
    values = dict(values)
    if draw.likely(0.03):
        values["more"] = (1,)
    for _ in range(draw.choice((1, 1, 1, 2))):
        argument = draw.choice(KERNELS[kernel])
        values[argument.name] = _worse(draw, kernel, argument.name, argument.kind, values[argument.name])
    return values


def _worse(draw: Draw, kernel: str, name: str, kind: str, value: Any) -> Any:
    if kind in ("int64_t", "float", "bool"):
        if (kernel, name) in SLOW or draw.likely(0.3):
            return draw.choice((*NO_NUMBERS, -1, -(2**63), 2**31, 2**63 - 1))
        return draw.choice(NUMBERS) if draw.likely(0.7) or not isinstance(value, int) else value + draw.choice((-1, 1))
    if isinstance(value, list):
        return draw.choice(LISTS)(draw, value)
    if draw.likely(0.1) or not isinstance(value, Lent):
        return draw.choice((None, 3, "residual", [value], object(), torch.zeros(3, device="meta"), np.zeros(())))
    return draw.choice(ARRAYS)(draw, value)


def _resized(draw: Draw, value: Lent) -> Any:
    size = draw.choice((0, 1, len(value) // 2, max(len(value) - 1, 0), len(value) + 1, 2 * len(value), len(value) + 64))
    return draw.lend(np.resize(value.was, size))


def _retyped(draw: Draw, value: Lent) -> Any:
    same = {1: ("int8", "bool"), 2: ("float16", "int16"), 4: ("int32", "float32", "uint32"), 8: ("float64", "int64", "uint64")}
    if draw.likely(0.5):
        return draw.lend(value.was.view(draw.choice(same[value.was.itemsize])))
    with np.errstate(all="ignore"):
        return draw.lend(value.floats.real, draw.choice(("float64", "float16", "int64", "int16", "uint8", "complex64", "bool")))


def _strided(draw: Draw, value: Lent) -> Any:
    twice = np.repeat(value.was, 2)
    return draw.choice((twice[::2], twice[::-2], torch.from_numpy(twice)[::2], np.broadcast_to(value.was[:1], len(value))))


def _misaligned(draw: Draw, value: Lent) -> Any:
    if value.was.itemsize == 1:
        return _resized(draw, value)
    at = draw.randrange(1, value.was.itemsize)
    memory = np.zeros(value.was.nbytes + value.was.itemsize, np.uint8)
    view = memory[at : at + value.was.nbytes].view(value.was.dtype)
    if draw.likely(0.5) or len(view) == 0:
        return view
    return torch.frombuffer(memory, dtype=_torch(value), offset=at, count=len(view))


def _torch(value: Lent) -> torch.dtype:
    return torch.from_numpy(value.was[:0]).dtype


def _elsewhere(draw: Draw, value: Lent) -> Any:
    if draw.likely(0.5):
        return torch.empty(len(value), dtype=_torch(value), device="meta")
    return OnGpu(value, draw.choice(((2, 0), (2, 5), (13, 0), (1, 0), (-1, -1), "cuda", None)))


def _odd(draw: Draw, value: Lent) -> Any:
    content = value.was.view(value.was.dtype.str.replace("u", "i")) if value.was.itemsize > 1 else value.was
    tensor = torch.from_numpy(content.copy())
    odd: list[Callable[[], Any]] = [
        lambda: tensor.to_sparse(),
        lambda: torch.empty((2**62, 0, 4)),
        lambda: torch._neg_view(tensor) if tensor.is_floating_point() else tensor,
        lambda: torch.nn.Parameter(tensor, requires_grad=True) if tensor.is_floating_point() else tensor,
        lambda: np.array(value.was.tolist(), object),
        lambda: _read_only(value),
    ]
    return draw.choice(odd)()


def _read_only(value: Lent) -> Any:
    view = value.was.copy()
    view.flags.writeable = False
    return view


ARRAYS = (_resized, _resized, _retyped, _strided, _misaligned, _elsewhere, _odd)
LISTS: tuple[Callable[[Draw, list[Any]], Any], ...] = (
    lambda draw, value: None,
    lambda draw, value: [],
    lambda draw, value: tuple(value),
    lambda draw, value: value[:-1],
    lambda draw, value: [*value, *value],
    lambda draw, value: [*value, None],
    lambda draw, value: value * 225,
    lambda draw, value: torch.zeros(2, 3),
    lambda draw, value: {0: 1},
    lambda draw, value: [draw.choice(ARRAYS)(draw, each) if isinstance(each, Lent) else each for each in value],
    lambda draw, value: [draw.choice(ARRAYS)(draw, each) if isinstance(each, Lent) else each for each in value],
)
