"""The only importer of the compiled extension: its constants, and the facts about arrays that every call of a kernel needs.

Tensors go in as they are, on CPU or GPU, on torch's current stream. The binding takes NumPy's and CuPy's arrays, too.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradcomp import native as room
from gradcomp.aliases import GradcompWarning
from gradcomp.native import cuda_versions


class Unloaded:
    """The constants of an extension that did not load: why, and what to do."""

    built_with_cuda, cuda_version = False, 0

    def __init__(self, error: ImportError):
        self.reason = str(error)

    @property
    def remedy(self) -> str:
        """Say what to do. A script beside a checkout's package gets that one, although another is installed."""
        own = Path(__file__).resolve().parents[2]
        others = [place for place in map(Path, sys.path) if place.resolve() != own and [*place.glob("gradcomp/_native*.so")]]
        if others:
            return (
                f"Python takes the checkout {own} in place of the gradcomp in {others[0]}: keep and start your script elsewhere"
            )
        return "build it with scripts/setup or `pip install .`"

    def __getattr__(self, name: str) -> int:
        return 1  # a constant, which no kernel will need


# The extension's functions. Tests put the emulated ones in their place.
native: Any
try:
    import gradcomp._native as native
except ImportError as error:
    native = Unloaded(error)
    if not room.only_looks:
        raise ImportError(f"gradcomp's compiled extension cannot be loaded ({error}): {native.remedy}") from error

# Anything with __dlpack__.
Array = Any

# Gradients of one launch, at most.
MOST_PIECES: int = native.most_pieces
# Ranks of one launch, at most.
MOST_RANKS: int = native.most_ranks
# Numbers of a layer's moments: mean, squared deviations, smallest, largest, and the number of entries that are not 0.
MOMENTS: int = native.moments
# Entries of a sparse update that share a mark.
LINE: int = native.line
# The zeros in which a kernel counts on a GPU.
COUNTERS: int = native.counters
# A sketch's columns are a multiple of this.
TILE: int = native.tile
# Entries of a block. A part of a search has every so many blocks.
SEARCH_BLOCK: int = native.search_block
# The largest magnitude in a residual: a little below the largest float, so that rounding a sum of shares cannot overflow.
LARGEST: float = native.largest

BUILT_WITH_CUDA: bool = native.built_with_cuda
# The CUDA of the kernels: 13000 is 13.0, and 0 means that there are none.
CUDA_VERSION: int = native.cuda_version

if BUILT_WITH_CUDA and (misfit := cuda_versions.misfit(CUDA_VERSION, cuda_versions.driver_version(), torch.version.cuda)):
    warnings.warn(misfit, GradcompWarning, stacklevel=2)


def _public_stream(index: int) -> int:
    return int(torch.cuda.current_stream(index).cuda_stream)


# torch's own way to a stream's address is 20 times as fast as the public one, which makes an object.
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _public_stream)


def numbered(device: torch.device) -> torch.device:
    """Number a device as its tensors do: "cuda" is the current GPU."""
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" and device.index is None else device


def stream(tensor: Tensor) -> int:
    """Find the current stream of a tensor's device; 0 on a CPU."""
    return current_stream(tensor.device.index) if tensor.is_cuda else 0


def queue(array: Array) -> dict[str, int]:
    """Name the place where a kernel runs: the stream, and on CPUs the number of threads. The binding refuses other objects."""
    on_cuda = isinstance(array, Tensor) and array.is_cuda  # without calls: every kernel asks
    return {"stream": current_stream(array.device.index) if on_cuda else 0, "threads": torch.get_num_threads()}


@functools.lru_cache(maxsize=1024)
def scratch_words(extension: Any, kernel: str, on_cuda: bool, n: int, most: int) -> int:
    """Ask the extension for the words of scratch that a kernel needs. Buckets ask in every step, always for the same sizes."""
    return int(getattr(extension, f"{kernel}_scratch")(on_cuda, n, most))


def launches(kernel: str, **arrays: Sequence[Array]) -> list[slice]:
    """Cut the ranks into slices that fit one launch each; none for no ranks. Every argument has an array from each rank."""
    (last, own), *others = reversed(arrays.items())
    for name, each in others:
        if len(each) != len(own):
            raise ValueError(f"{kernel}: {name} come from {len(each)} ranks, but {last} from {len(own)}")
    return [slice(first, first + MOST_RANKS) for first in range(0, len(own), MOST_RANKS)]
