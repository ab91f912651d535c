"""Memory that outlives a call: the scratch of kernels and sparse updates, which a reducer owns, and copies to the host."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradcomp.native import extension
from gradcomp.native.extension import LINE
from gradcomp.native.streams import Streams

# Steps between the start of a copy to the host and its use: the copy has arrived then. All ranks act alike.
DELAY = 8

# Where scratch lies: its use and type, the device and the stream.
Place = tuple[str, str, torch.device, int]


@dataclass
class ZeroedUpdate:
    """A zeroed array and its zeroed marks, for lending. streams: that of a GPU on which both were zeroed.

    kept: a place for a copy of the first entry.
    starts: the first entries of both, by their number, since buckets of a few sizes borrow it in turn.
    """

    flat: Tensor
    marks: Tensor
    streams: Streams
    kept: Tensor
    starts: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def first(self, n: int) -> tuple[Tensor, Tensor]:
        """Return the first n entries and their marks."""
        start = self.starts.get(n)
        if start is None:
            start = self.starts[n] = self.flat[:n], self.marks[: -(-n // LINE)]
        return start


@dataclass
class Update:
    """The mean update of a bucket. An exchange returns it; the driver of the exchange gives it back to its memory.

    flat: all entries. marks: one for each line of 64 entries, 0 if the line holds only zeros; None if unknown. source: the
    arrays that it was lent from; None if it was not lent. copied: the first entry, once it has been copied: the kernel that
    delivers the update can then wipe it. is_wiped: that kernel has done so.
    """

    flat: Tensor
    marks: Tensor | None = None
    source: ZeroedUpdate | None = field(default=None, repr=False)
    copied: Tensor | None = None
    is_wiped: bool = False

    @property
    def first(self) -> Tensor:
        """The first entry, which is not finite where the exchange failed. One that was lent has kept this view."""
        if self.copied is not None:
            return self.copied
        return self.flat[:1] if self.source is None else self.source.first(1)[0]


class Memory:
    """A lender of scratch and sparse updates, which keeps them for the next call."""

    def __init__(self) -> None:
        self._scratch: dict[Place, Tensor] = {}
        self._lent: dict[tuple[Place, int], Tensor] = {}
        self._free: dict[torch.device, list[ZeroedUpdate]] = {}
        self._counters: dict[tuple[torch.device, int], Tensor] = {}

    def scratch(self, use: str, words: int, like: Tensor, dtype: str = "int32") -> Tensor:
        """Lend an array of `words` 32-bit entries on the device of `like`, full of garbage.

        The next call with the same use returns the same memory, so the array is valid only until its borrower yields.
        """
        place = use, dtype, like.device, extension.stream(like)
        lent = self._lent.get((place, words))
        return self._lend_first(place, words, like) if lent is None else lent

    def _lend_first(self, place: Place, words: int, like: Tensor) -> Tensor:
        """Allocate scratch of a new size, or lend the first words of a larger one."""
        buffer = self._scratch.get(place)
        if buffer is None or buffer.numel() < words:
            buffer = self._scratch[place] = torch.empty(words, dtype=getattr(torch, place[1]), device=like.device)
            self._lent = {key: lent for key, lent in self._lent.items() if key[0] != place}
        lent = self._lent[place, words] = buffer[:words]
        return lent

    def counters(self, like: Tensor) -> Tensor:
        """Lend the zeros in which kernels on the device of `like` count. Each leaves zeros for the next one on its stream."""
        place = like.device, extension.stream(like)
        found = self._counters.get(place)
        if found is None:
            found = self._counters[place] = torch.zeros(extension.COUNTERS, dtype=torch.int32, device=like.device)
        return found

    def lend(self, n: int, device: torch.device) -> Update:
        """Lend n zeros for an update that only sparse codecs write to. This costs nothing for lines that stay 0.

        device: with its number.
        """
        free = self._free.get(device)
        source = free.pop() if free else None
        if source is None or source.flat.numel() < n:
            marks = torch.zeros(-(-n // LINE), dtype=torch.uint8, device=device)
            source = ZeroedUpdate(torch.zeros(n, device=device), marks, Streams(device), torch.zeros(1, device=device))
        elif source.streams.has_streams:
            source.streams.join()
        return Update(*source.first(n), source)

    def give_back(self, update: Update) -> None:
        """Take an update back and wipe its marked lines, unless that is done. An update that was not lent is left alone."""
        source, update.source = update.source, None
        if source is None:
            return
        if not update.is_wiped:
            extension.native.wipe(update.flat, update.marks, **extension.queue(update.flat))
        if source.streams.has_streams:
            source.streams.clear()
            source.streams.note()
        self._free.setdefault(source.flat.device, []).append(source)


class HostCopy:
    """A copy of a tensor of numbers on its way to main memory. The copy is read some steps later, when it has arrived.

    again: a copy that has been read, whose memory then serves this one if it has the shape.
    """

    def __init__(self, numbers: Tensor, again: HostCopy | None = None):
        self._host: Tensor
        self._event: Any
        if again is not None and again._host.shape == numbers.shape and (again._event is not None) == numbers.is_cuda:
            self._host, self._event = again._host, again._event
        else:
            self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=numbers.is_cuda)
            self._event = torch.cuda.Event() if numbers.is_cuda else None
        self._host.copy_(numbers, non_blocking=True)
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(numbers.device))

    def largest(self) -> int:
        """Return the largest number."""
        return int(max(self.all()))

    def all(self) -> list[float]:
        """Return all numbers."""
        if self._event is not None:
            self._event.synchronize()  # returns at once: the copy began steps ago
        numbers: list[float] = self._host.flatten().tolist()
        return numbers
