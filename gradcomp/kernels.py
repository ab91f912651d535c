"""The kernels as Python functions: the only importer of the extension. Finds the stream, threads and scratch that a call needs.

Arrays go in as they are: torch tensors, NumPy and CuPy arrays, on CPU or GPU, on the stream that is current in their library.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

try:
    import gradcomp._native as _native
except ImportError as error:  # pragma: no cover - depends on how the package was put there
    raise ImportError(
        f"gradcomp's compiled part cannot be loaded ({error}); build it with scripts/setup or `pip install .`"
    ) from error

Array = Any
"""Anything with __dlpack__."""

MOST_PIECES: int = _native.most_pieces
BUILT_WITH_CUDA: bool = _native.built_with_cuda
_scratch_buffers: dict[tuple[str, str, int, int], Array] = {}


def _library(array: Array) -> str:
    return type(array).__module__.partition(".")[0]


def _on_cuda(array: Array) -> bool:
    return int(array.__dlpack_device__()[0]) != 1


def _stream(array: Array) -> int:
    """The stream that is current in the array's own library; 0 on a CPU."""
    if isinstance(array, Tensor):
        return int(torch.cuda.current_stream(array.device).cuda_stream) if array.is_cuda else 0
    if _library(array) == "cupy":
        return int(sys.modules["cupy"].cuda.get_current_stream().ptr)
    return 0


def _queue(array: Array) -> dict[str, int]:
    return {"stream": _stream(array), "threads": torch.get_num_threads()}


def _scratch(use: str, words: int, like: Array, dtype: str = "int32") -> Array:
    """A buffer of 32-bit words on the array's device, kept for the next call of the same use, thread and stream."""
    library = _library(like)
    device = str(like.device) if hasattr(like, "device") else "cpu"
    key = (use, f"{library} {device}", threading.get_ident(), _stream(like))
    buffer = _scratch_buffers.get(key)
    if buffer is None or len(buffer) < words:
        module = torch if library == "torch" or isinstance(like, Tensor) else sys.modules[library]
        where = {"device": like.device} if module is torch else {}
        buffer = _scratch_buffers[key] = module.empty(words, dtype=getattr(module, dtype), **where)
    return buffer[:words]


def zeros(n: int, device: torch.device) -> Tensor:
    """A zeroed float32 array for an update. It is used again: valid until this thread asks for the next one on this device."""
    flat: Tensor = _scratch("zeros", n, torch.empty(0, device=device), "float32")
    return flat.zero_()


def _chunks(grads: Sequence[Array]) -> list[tuple[Sequence[Array], slice]]:
    """The gradients in lists that fit one launch, each with its place in the flat bucket."""
    chunks = []
    at = 0
    for first in range(0, len(grads), MOST_PIECES):
        part = grads[first : first + MOST_PIECES]
        stop = at + sum(_count(grad) for grad in part)
        chunks.append((part, slice(at, stop)))
        at = stop
    return chunks


def _count(array: Array) -> int:
    return array.numel() if isinstance(array, Tensor) else array.size


def flatten(grads: Sequence[Array], flat: Array) -> None:
    """flat <- grads, one after the other, cast to float32."""
    for part, place in _chunks(grads):
        _native.flatten(part, flat[place], **_queue(flat))


def accumulate(
    grads: Sequence[Array], value: Array, velocity: Array | None, flag: Array, momentum: float = 0.0, nesterov: bool = False
) -> None:
    """velocity <- momentum * velocity + grads; value <- value + velocity; flag <- whether an entry was not finite."""
    queue = _queue(value)
    if len(grads) <= MOST_PIECES:
        _native.accumulate(grads, value, velocity, flag, momentum, nesterov, **queue)
        return
    chunks = _chunks(grads)
    flags = _scratch("flags", len(chunks), value)
    for i, (part, place) in enumerate(chunks):
        own = None if velocity is None else velocity[place]
        _native.accumulate(part, value[place], own, flags[i : i + 1], momentum, nesterov, **queue)
    flag[:] = flags.max()


def spread(flat: Array, grads: Sequence[Array], scale: float = 1.0) -> None:
    """grads <- scale * flat, each in its own memory and type."""
    for part, place in _chunks(grads):
        _native.spread(flat[place], part, scale, **_queue(flat))


def take_all(value: Array, taken: Array, flag: Array | None = None) -> Array:
    """taken <- value; value <- 0. Where the flag is set, taken[0] becomes NaN. Returns taken."""
    _native.take_all(value, flag, taken, **_queue(value))
    return taken


def take_topk(
    value: Array,
    k: int,
    values: Array,
    indices: Array,
    header: Array,
    velocity: Array | None = None,
    flag: Array | None = None,
) -> None:
    """Moves the k entries of largest magnitude out of value, in index order, ties to the lower index; header <- (k, flag)."""
    words = _native.take_topk_scratch(_on_cuda(value), _count(value), k)
    _native.take_topk(value, velocity, flag, k, values, indices, header, _scratch("topk", words, value), **_queue(value))


def add_sparse(target: Array, values: Array, indices: Array, header: Array, scale: float = 1.0) -> None:
    """target[indices] += scale * values; where the header is flagged or the payload malformed, target[0] becomes NaN."""
    _native.add_sparse(target, values, indices, header, scale, **_queue(target))


def restore_sparse(value: Array, values: Array, indices: Array, header: Array, update: Array) -> None:
    """Puts what was taken back into value, if the update came back not finite (update[0] says so)."""
    _native.restore_sparse(value, values, indices, header, update, **_queue(value))
