"""Sparse entries as payloads, in two forms with one face: exact, 64 bits an entry, and compact, 32. wire.md has their bytes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from gradcomp.knobs import knob
from gradcomp.messages import payload as payloads
from gradcomp.native import kernels
from gradcomp.native.memory import Update
from gradcomp.protocol import Acc
from gradcomp.requests import Field, Form, Payload

BLOCK = 1 << 16
"""Entries of a block, inside which a place takes 16 bits."""

MOST_EXPONENT = 253


class Entries(NamedTuple):
    """Sparse entries: values, their places, and the header (how many wanted to travel; was a gradient not finite?)."""

    values: Tensor
    indices: Tensor
    header: Tensor


class Taken(NamedTuple):
    """Entries that a take kernel fills in, and the payload that they are to travel in."""

    codec: Codec
    entries: Entries
    payload: Payload


class Codec(ABC):
    """One form of sparse entries. All that differs between the forms stands in its two subclasses."""

    entry_bytes: ClassVar[int]
    """What an entry costs on the wire, beside what a payload has once."""

    @abstractmethod
    def form(self, n: int, capacity: int) -> Form:
        """Describe a payload with room for so many of n entries."""

    @abstractmethod
    def allocate(self, acc: Acc, capacity: int) -> Taken:
        """Make room for so many of acc's entries, for a take kernel to fill in before the caller yields."""

    @abstractmethod
    def write(self, payload: Payload, values: Tensor, indices: Tensor, rest: Tensor | None) -> None:
        """Write entries that are there into a payload that has its header. What rounding loses is added to rest, if given."""

    @abstractmethod
    def pack(self, taken: Taken, rest: Tensor | None) -> Payload:
        """Make what was taken ready to travel. What rounding loses is added to rest, if given."""

    @abstractmethod
    def read(self, payload: Payload) -> Entries:
        """Read the entries of a payload; of a malformed one at least the header's flag is set, where places are not plain."""

    @abstractmethod
    def add(self, update: Update, came: Sequence[Payload], scale: float = 1.0) -> None:
        """Add payloads, one after the other. Where one is flagged or malformed, the update's first entry becomes NaN."""

    @abstractmethod
    def settle(self, residual: Tensor, payload: Payload, update: Update, keep: float = 0.0) -> None:
        """Leave keep times what went behind; where the update is not finite, put all of it back."""

    @abstractmethod
    def places(self, payload: Payload, wanted: int, sender: str) -> Tensor:
        """The places that a payload names, which may be any."""

    def take(self, acc: Acc, k: int, velocity: Tensor | None = None) -> Taken:
        """Move the k largest entries out of acc, in index order; mask the velocity there, if it is given."""
        taken = self.allocate(acc, k)
        kernels.take_topk(acc.residual, k, *taken.entries, velocity, acc.flag, acc.peaks, acc.memory)
        return taken

    def check(self, came: Mapping[int, Payload], update: Update, n: int) -> None:
        """Say what is wrong with payloads that were added, by rank: on a CPU, where the update's NaN says that one is."""
        if update.flat.device.type == "cpu" and not math.isfinite(update.flat[0]):
            for rank, payload in came.items():
                self.check_one(payload, n, f"rank {rank}")

    def check_one(self, payload: Payload, n: int, sender: str) -> None:
        """Raise where a payload for n entries is malformed."""
        wanted, flag = payload["header"].tolist()
        if wanted < 0 or flag not in (0, 1):
            raise _malformed(sender, f"its header says {wanted} entries and flag {flag}")
        places = self.places(payload, wanted, sender)
        if not ((places >= 0) & (places < n)).all():
            raise _malformed(sender, f"it names places outside the bucket of {n} entries")


class Exact(Codec):
    """Values and places of 32 bits each."""

    entry_bytes = 8

    def form(self, n: int, capacity: int) -> Form:
        return (
            Field("header", torch.int32, 2),
            Field("values", torch.float32, capacity),
            Field("indices", torch.int32, capacity),
        )

    def allocate(self, acc: Acc, capacity: int) -> Taken:
        payload = payloads.empty(self.form(acc.residual.numel(), capacity), acc.residual.device)
        return Taken(self, self.read(payload), payload)

    def write(self, payload: Payload, values: Tensor, indices: Tensor, rest: Tensor | None) -> None:
        payload["values"].copy_(values)
        payload["indices"].copy_(indices)

    def pack(self, taken: Taken, rest: Tensor | None) -> Payload:
        return taken.payload

    def read(self, payload: Payload) -> Entries:
        return Entries(payload["values"], payload["indices"], payload["header"])

    def add(self, update: Update, came: Sequence[Payload], scale: float = 1.0) -> None:
        for payload in came:
            kernels.add_sparse(update.flat, *self.read(payload), scale, update.marks)

    def settle(self, residual: Tensor, payload: Payload, update: Update, keep: float = 0.0) -> None:
        kernels.settle_sparse(residual, *self.read(payload), update.flat, keep)

    def places(self, payload: Payload, wanted: int, sender: str) -> Tensor:
        return payload["indices"][:wanted]


class Compact(Codec):
    """Entries of 32 bits, counted by blocks of 2^16."""

    entry_bytes = 4

    def form(self, n: int, capacity: int) -> Form:
        return (
            Field("header", torch.int32, 2),
            Field("blocks", torch.int32, -(-n // BLOCK)),
            Field("entries", torch.int32, capacity),
        )

    def allocate(self, acc: Acc, capacity: int) -> Taken:
        payload = payloads.empty(self.form(acc.residual.numel(), capacity), acc.residual.device)
        values = acc.memory.scratch("values", capacity, acc.residual, "float32")
        indices = acc.memory.scratch("indices", capacity, acc.residual, "int32")
        return Taken(self, Entries(values, indices, payload["header"]), payload)

    def write(self, payload: Payload, values: Tensor, indices: Tensor, rest: Tensor | None) -> None:
        kernels.pack_sparse(values, indices, payload["header"], rest, payload["blocks"], payload["entries"])

    def pack(self, taken: Taken, rest: Tensor | None) -> Payload:
        self.write(taken.payload, taken.entries.values, taken.entries.indices, rest)
        return taken.payload

    def read(self, payload: Payload) -> Entries:
        header = payload["header"].clone()
        values = torch.zeros(payload.form[-1].length, device=header.device)
        indices = torch.zeros(values.shape, dtype=torch.int32, device=header.device)
        kernels.unpack_sparse(values, indices, header, payload["blocks"], payload["entries"])
        return Entries(values, indices, header)

    def add(self, update: Update, came: Sequence[Payload], scale: float = 1.0) -> None:
        blocks, entries, headers = ([payload[name] for payload in came] for name in ("blocks", "entries", "header"))
        kernels.add_packed(update.flat, blocks, entries, headers, scale, update.marks)

    def settle(self, residual: Tensor, payload: Payload, update: Update, keep: float = 0.0) -> None:
        kernels.settle_packed(residual, payload["blocks"], payload["entries"], payload["header"], update.flat, keep)

    def places(self, payload: Payload, wanted: int, sender: str) -> Tensor:
        entries = payload["entries"][:wanted]
        counts, exponents = payload["blocks"] & 0xFFFFFF, (payload["blocks"] >> 24) & 0xFF
        if (counts > BLOCK).any() or (exponents > MOST_EXPONENT).any():
            raise _malformed(sender, f"a block holds more than {BLOCK} entries, or its exponent is none")
        if int(counts.sum()) != entries.numel():
            raise _malformed(sender, f"its blocks count {int(counts.sum())} entries, but {entries.numel()} came")
        return torch.repeat_interleave(torch.arange(counts.numel()) * BLOCK, counts.long()) + (entries & 0xFFFF)


EXACT, COMPACT = Exact(), Compact()
CODECS: dict[str, Codec] = {"compact": COMPACT, "exact": EXACT}
"""By the name that a wire knob has for them."""


def wire_knob() -> Any:
    """The knob that names a codec."""
    return knob("compact", "form of an entry on the wire: 32 bits, what rounding loses waits; or 64 bits", choices=CODECS)


def ratio_knob() -> Any:
    """The knob that says how many entries are sent."""
    return knob(0.001, "share of entries sent; lower = fewer bytes, staler gradients", above=0, most=1)


def count_of(ratio: float, n: int) -> int:
    """How many entries this share of n is: one at least."""
    return min(n, max(1, math.ceil(ratio * n)))


def _malformed(sender: str, what: str) -> ValueError:
    return ValueError(f"the payload of {sender} is malformed: {what}; do all ranks run the same gradcomp?")
