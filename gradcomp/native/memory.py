"""Memory that outlives a call: scratch of kernels, and sparse updates. A reducer owns it; with the reducer it goes."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from gradcomp.native import extension
from gradcomp.native.extension import LINE, Array

Place = tuple[torch.device, int]
"""A device and one of its streams: memory is used again only where the kernels that last used it have run before."""


class Sheet(NamedTuple):
    """Zeros to be lent as updates, and their marks, which are 0."""

    flat: Tensor
    marks: Tensor


@dataclass
class Update:
    """The mean update of a bucket: an exchange returns it, and whoever drives the exchange gives it back to its memory.

    flat: all entries. marks: one for each line of 64 entries, 0 where the line holds zeros and need not be read; None where
    that is not known. sheet: what it was lent from; None where it was not lent.
    """

    flat: Tensor
    marks: Tensor | None = None
    sheet: Sheet | None = field(default=None, repr=False)


class Memory:
    """Lends scratch and sparse updates, and keeps them for the next time."""

    def __init__(self) -> None:
        self._scratch: dict[tuple[str, str, str, int], Array] = {}
        self._free: dict[Place, list[Sheet]] = {}

    def scratch(self, use: str, words: int, like: Array, dtype: str = "int32") -> Array:
        """Lend an array of 32-bit entries where `like` lies, full of garbage.

        The same use gets the same memory again: it is valid until the code that asked for it next yields.
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
        """Lend n zeros for an update that the sparse codecs alone write to. Most of it costs nothing."""
        free = self._free.get(_place(device), [])
        sheet = free.pop() if free else None
        if sheet is None or len(sheet.flat) < n:
            lines = -(-n // LINE)
            sheet = Sheet(torch.zeros(n, device=device), torch.zeros(lines, dtype=torch.uint8, device=device))
        return Update(sheet.flat[:n], sheet.marks[: -(-n // LINE)], sheet)

    def give_back(self, update: Update) -> None:
        """Take back what was lent: its marked lines become zeros again. An update that was not lent is left alone."""
        sheet, update.sheet = update.sheet, None
        if sheet is not None:
            extension.native.wipe(update.flat, update.marks, **extension.queue(update.flat))
            self._free.setdefault(_place(update.flat.device), []).append(sheet)


def _place(device: torch.device) -> Place:
    if device.type != "cuda":
        return device, 0
    stream = torch.cuda.current_stream(device)
    return stream.device, stream.cuda_stream  # with the number of the GPU, where "cuda" means the current one
