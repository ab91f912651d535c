"""The only importer of the compiled extension: its constants, and what every call of a kernel needs to know of its arrays.

Arrays go in as they are: torch tensors, NumPy and CuPy arrays, on CPU or GPU, on the stream that is current in their library.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

try:
    import gradcomp._native as _native
except ImportError as error:  # pragma: no cover - depends on how the package was put there
    raise ImportError(
        f"gradcomp's compiled part cannot be loaded ({error}); build it with scripts/setup or `pip install .`"
    ) from error

native: Any = _native
"""The extension's functions; tests put the emulated ones in its place."""

Array = Any
"""Anything with __dlpack__."""

MOST_PIECES: int = native.most_pieces
MOST_RANKS: int = native.most_ranks
MOMENTS: int = native.moments
"""Numbers a layer's statistics consist of: mean, squared deviations, smallest, largest, how many are not zero."""
LINE: int = native.line
"""Entries of a sparse update that share a mark, and of a residual that share a peak."""
TILE: int = native.tile
"""A sketch's columns are a multiple of this."""
UNKNOWN_PEAK = 0x7F800000
"""The peak of a line that may hold anything: infinity's key."""

BUILT_WITH_CUDA: bool = native.built_with_cuda


def library(array: Array) -> str:
    """The array's own library: torch, numpy or cupy."""
    return "torch" if isinstance(array, Tensor) else type(array).__module__.partition(".")[0]


def on_cuda(array: Array) -> bool:
    """Whether the array lies on a GPU."""
    return int(array.__dlpack_device__()[0]) != 1


def count(array: Array) -> int:
    """The array's number of entries."""
    return array.numel() if isinstance(array, Tensor) else array.size


def stream(array: Array) -> int:
    """The stream that is current in the array's own library; 0 on a CPU."""
    if isinstance(array, Tensor):
        return int(torch.cuda.current_stream(array.device).cuda_stream) if array.is_cuda else 0
    if library(array) == "cupy":
        return int(sys.modules["cupy"].cuda.get_current_stream().ptr)
    return 0


def queue(array: Array) -> dict[str, int]:
    """Where a kernel is to run: the stream, and on CPUs the number of threads."""
    return {"stream": stream(array), "threads": torch.get_num_threads()}


def launches(ranks: int) -> list[slice]:
    """The ranks, as many at a time as fit one launch."""
    return [slice(first, first + MOST_RANKS) for first in range(0, ranks, MOST_RANKS)]
