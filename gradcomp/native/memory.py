"""Memory that outlives a call: the scratch of kernels, and sparse updates. Its owner is a reducer."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradcomp.native import extension, streams
from gradcomp.native.extension import LINE, Array


class ZeroedUpdate(NamedTuple):
    """A zeroed array and its zeroed marks, for lending. stream: that of a GPU on which both were zeroed."""

    flat: Tensor
    marks: Tensor
    stream: Any = None


@dataclass
class Update:
    """The mean update of a bucket. An exchange returns it; the driver of the exchange gives it back to its memory.

    flat: all entries.
    marks: one for each line of 64 entries, 0 if the line holds only zeros; None if that is not known.
    source: the arrays that it was lent from; None if it was not lent.
    """

    flat: Tensor
    marks: Tensor | None = None
    source: ZeroedUpdate | None = field(default=None, repr=False)


class Memory:
    """A lender of scratch and sparse updates, which keeps them for the next call."""

    def __init__(self) -> None:
        self._scratch: dict[tuple[str, str, str, int], Array] = {}
        self._free: dict[torch.device, list[ZeroedUpdate]] = {}

    def scratch(self, use: str, words: int, like: Array, dtype: str = "int32") -> Array:
        """Lend an array of `words` 32-bit entries on the device of `like`, full of garbage.

        The next call with the same use returns the same memory, so the array is valid only until its borrower yields.
        """
        library = extension.library(like)
        key = (use + dtype, library, str(like.device) if hasattr(like, "device") else "cpu", extension.stream(like))
        buffer = self._scratch.get(key)
        if buffer is None or len(buffer) < words:
            module = sys.modules[library]
            where = {"device": like.device} if module is torch else {}
            buffer = self._scratch[key] = module.empty(words, dtype=getattr(module, dtype), **where)
        return buffer[:words]

    def lend(self, n: int, device: torch.device) -> Update:
        """Lend n zeros for an update that only sparse codecs write to. This costs nothing for lines that stay 0."""
        lines, place = -(-n // LINE), _numbered(device)
        free = self._free.get(place, [])
        source = free.pop() if free else None
        if source is None or len(source.flat) < n:
            source = ZeroedUpdate(torch.zeros(n, device=place), torch.zeros(lines, dtype=torch.uint8, device=place))
        elif source.stream is not None:
            streams.follow(torch.cuda.current_stream(place), source.stream)
        return Update(source.flat[:n], source.marks[:lines], source)

    def give_back(self, update: Update) -> None:
        """Take an update back and wipe its marked lines. An update that was not lent is left alone."""
        source, update.source = update.source, None
        if source is not None:
            extension.native.wipe(update.flat, update.marks, **extension.queue(update.flat))
            stream = torch.cuda.current_stream(source.flat.device) if source.flat.is_cuda else None
            self._free.setdefault(source.flat.device, []).append(source._replace(stream=stream))


def _numbered(device: torch.device) -> torch.device:
    """Number the device as tensors do: "cuda" means the current one."""
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" and device.index is None else device
