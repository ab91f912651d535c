"""Memory that outlives a call: scratch of kernels, and sparse updates. A reducer owns it; with the reducer it goes."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradcomp.native import extension
from gradcomp.native.extension import LINE, Array


class Sheet(NamedTuple):
    """Zeros to be lent as updates, their marks, which are 0, and on a GPU the event after which both are so."""

    flat: Tensor
    marks: Tensor
    ready: Any = None


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
        self._free: dict[torch.device, list[Sheet]] = {}

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
        lines, place = -(-n // LINE), _numbered(device)
        free = self._free.get(place, [])
        sheet = free.pop() if free else None
        if sheet is None or len(sheet.flat) < n:
            sheet = Sheet(torch.zeros(n, device=place), torch.zeros(lines, dtype=torch.uint8, device=place))
        elif sheet.ready is not None:
            torch.cuda.current_stream(place).wait_event(sheet.ready)  # it may come back on another stream than it is lent on
        return Update(sheet.flat[:n], sheet.marks[:lines], sheet)

    def give_back(self, update: Update) -> None:
        """Take back what was lent: its marked lines become zeros again. An update that was not lent is left alone."""
        sheet, update.sheet = update.sheet, None
        if sheet is not None:
            extension.native.wipe(update.flat, update.marks, **extension.queue(update.flat))
            ready = torch.cuda.current_stream(sheet.flat.device).record_event() if sheet.flat.is_cuda else None
            self._free.setdefault(sheet.flat.device, []).append(sheet._replace(ready=ready))


def _numbered(device: torch.device) -> torch.device:
    """The device with its number, where "cuda" means the current one: as tensors have it."""
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" and device.index is None else device
