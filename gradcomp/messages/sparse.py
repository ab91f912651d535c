"""Payloads of sparse entries, by three codecs: exact, compact and coarse, of 64, 15 and 11 bits. csrc/wire.md has the bytes."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradcomp.core.compressor import Acc
from gradcomp.core.requests import Field, Form, Payload
from gradcomp.knobs import knob
from gradcomp.messages import ascending, means
from gradcomp.messages import payload as payloads
from gradcomp.native import kernels
from gradcomp.native.extension import MOST_RANKS
from gradcomp.native.kernels.sparse import add_entries
from gradcomp.native.memory import Update

# The largest biased exponent of a block.
LARGEST_EXPONENT = 253

# Receives a step's payloads. Their headers count the entries that wanted to travel.
CountObserver = Callable[[Sequence[Payload]], None]


class Entries(NamedTuple):
    """Sparse entries: values, indices and header.

    header: the number of selected entries, which may exceed the capacity, and the flag.
    """

    values: Tensor
    indices: Tensor
    header: Tensor


class Taken(NamedTuple):
    """Entries that a take kernel fills in, with the payload that carries them. entries: None once they are packed."""

    codec: Codec
    entries: Entries | None
    payload: Payload

    @property
    def unpacked(self) -> Entries:
        """The entries, for exchanges that do not send them as they are."""
        assert self.entries is not None
        return self.entries


class Codec(ABC):
    """A codec of sparse entries. The subclasses hold all that differs between them."""

    @abstractmethod
    def form(self, n: int, capacity: int) -> Form:
        """Describe a payload of this capacity for a bucket of n entries."""

    def allocate(self, acc: Acc, capacity: int) -> Taken:
        """Allocate for `capacity` of acc's entries. A take kernel must fill them in before the caller yields."""
        payload = payloads.empty(self.form(acc.residual.numel(), capacity), acc.residual.device)
        values = acc.memory.scratch("values", capacity, acc.residual, "float32")
        indices = acc.memory.scratch("indices", capacity, acc.residual, "int32")
        return Taken(self, Entries(values, indices, payload["header"]), payload)

    @abstractmethod
    def write(self, payload: Payload, values: Tensor, indices: Tensor, residual: Tensor | None) -> None:
        """Write entries into a payload with a filled header. Add the rounding error to the residual, if given."""

    @abstractmethod
    def pack(self, taken: Taken, residual: Tensor | None) -> Payload:
        """Pack the taken entries into their payload. Add the rounding error to the residual, if given."""

    @abstractmethod
    def read(self, payload: Payload) -> Entries:
        """Read the entries of a payload. COMPACT sets the header's flag if the payload is malformed."""

    def add(self, update: Update, received: Sequence[Payload], scale: float = 1.0) -> None:
        """Add payloads, one after the other. The update's first entry becomes NaN if one is flagged or malformed."""
        for payload in received:
            kernels.add_sparse(update.flat, *self.read(payload), scale, update.marks)

    def settle(self, residual: Tensor, payload: Payload, update: Update, kept_share: float = 0.0) -> None:
        """Put kept_share times the sent entries back into the residual; put all of them back if the update is not finite."""
        kernels.settle_sparse(residual, *self.read(payload), update.flat, kept_share)

    @abstractmethod
    def indices(self, payload: Payload, wanted: int, sender: str) -> Tensor:
        """Return the indices that a payload names. They are unchecked and may lie outside the bucket."""

    def take(self, acc: Acc, k: int, ages: Tensor | None = None, packs: bool = False) -> Taken:
        """Move the k largest entries out of acc, in index order.

        ages: become 0 for these entries. packs: pack them in the same call, if the codec can; their rounding error then stays
        in the residual.
        """
        taken = self.allocate(acc, k)
        kernels.take_topk(acc.residual, k, *taken.unpacked, ages, acc.flag, acc.memory)
        return taken

    def take_above(self, acc: Acc, capacity: int, bar: kernels.Bar, ages: Tensor | None = None, packs: bool = False) -> Taken:
        """Move the entries above the bar out of acc, at most `capacity`, and steer the bar. ages, packs: see take()."""
        kernels.set_thresholds(bar.moments, bar.ends, bar.lam, bar.thresholds, pooled=bar.pooled)
        taken = self.allocate(acc, capacity)
        layers = bar.ends, bar.thresholds
        kernels.take_above(acc.residual, *layers, *taken.unpacked, ages, acc.flag, acc.memory)
        if bar.target is not None:
            kernels.steer(bar.lam, taken.unpacked.header, bar.target)
        return taken

    def add_and_settle(
        self, update: Update, received: Sequence[Payload], acc: Acc, payload: Payload, kept_share: float = 0.0
    ) -> None:
        """Add the mean of all ranks' payloads to the update, and settle this rank's own."""
        self.add(update, received, 1 / len(received))
        self.settle(acc.residual, payload, update, kept_share)

    def check(self, received: Iterable[tuple[int, Payload]], update: Update, n: int) -> None:
        """Raise if a payload is malformed, and name its rank. Finite updates, and those on a GPU, are not checked.

        received: the payloads, with their ranks.
        """
        if not update.flat.is_cuda and not math.isfinite(update.first):
            for rank, payload in received:
                self.check_one(payload, n, f"rank {rank}")

    def check_one(self, payload: Payload, n: int, sender: str) -> None:
        """Raise if a payload for a bucket of n entries is malformed."""
        wanted, flag = payload["header"].tolist()
        if wanted < 0 or flag not in (0, 1):
            raise malformed(sender, f"its header holds the count {wanted} and the flag {flag}")
        check_indices(self.indices(payload, wanted, sender), n, sender)


class Exact(Codec):
    """The codec of wire=exact: values and indices of 32 bits each."""

    def form(self, n: int, capacity: int) -> Form:
        return _exact_form(capacity)

    def allocate(self, acc: Acc, capacity: int) -> Taken:
        payload = payloads.empty(self.form(acc.residual.numel(), capacity), acc.residual.device)
        return Taken(self, self.read(payload), payload)

    def write(self, payload: Payload, values: Tensor, indices: Tensor, residual: Tensor | None) -> None:
        payload["values"].copy_(values)
        payload["indices"].copy_(indices)

    def pack(self, taken: Taken, residual: Tensor | None) -> Payload:
        return taken.payload

    def read(self, payload: Payload) -> Entries:
        return Entries(payload["values"], payload["indices"], payload["header"])

    def indices(self, payload: Payload, wanted: int, sender: str) -> Tensor:
        return payload["indices"][:wanted]


class Compact(Codec):
    """The codec of wire=compact: indices in the bits that they need, values as powers of two."""

    def form(self, n: int, capacity: int) -> Form:
        return _compact_form(n, capacity)

    def write(self, payload: Payload, values: Tensor, indices: Tensor, residual: Tensor | None) -> None:
        n, _ = _sizes(payload)
        kernels.pack_sparse(values, indices, payload["header"], n, payload["blocks"], payload["entries"], residual)

    def take(self, acc: Acc, k: int, ages: Tensor | None = None, packs: bool = False) -> Taken:
        if not packs:
            return super().take(acc, k, ages)
        payload = payloads.empty(self.form(acc.residual.numel(), k), acc.residual.device)
        kernels.take_topk_and_pack(acc.residual, k, payload.bytes, ages, acc.flag, acc.memory)
        return Taken(self, None, payload)

    def take_above(self, acc: Acc, capacity: int, bar: kernels.Bar, ages: Tensor | None = None, packs: bool = False) -> Taken:
        if not packs:
            return super().take_above(acc, capacity, bar, ages)
        payload = payloads.empty(self.form(acc.residual.numel(), capacity), acc.residual.device)
        kernels.take_above_and_pack(acc.residual, bar, capacity, payload.bytes, ages, acc.flag, acc.memory)
        return Taken(self, None, payload)

    def pack(self, taken: Taken, residual: Tensor | None) -> Payload:
        if taken.entries is not None:
            self.write(taken.payload, taken.entries.values, taken.entries.indices, residual)
        return taken.payload

    def read(self, payload: Payload) -> Entries:
        header = payload["header"].clone()
        n, capacity = _sizes(payload)
        values = torch.zeros(capacity, device=header.device)
        indices = torch.zeros(capacity, dtype=torch.int32, device=header.device)
        kernels.unpack_sparse(values, indices, header, n, payload["blocks"], payload["entries"])
        return Entries(values, indices, header)

    def add(self, update: Update, received: Sequence[Payload], scale: float = 1.0) -> None:
        blocks, entries, headers = ([payload[name] for payload in received] for name in ("blocks", "entries", "header"))
        capacity = _sizes(received[0])[1] if received else 1
        kernels.add_packed(update.flat, blocks, entries, headers, capacity, scale, update.marks)

    def add_and_settle(
        self, update: Update, received: Sequence[Payload], acc: Acc, payload: Payload, kept_share: float = 0.0
    ) -> None:
        if len(received) > MOST_RANKS:
            super().add_and_settle(update, received, acc, payload, kept_share)
        else:
            sent, capacity = [each.bytes for each in received], _sizes(payload)[1]
            if update.source is not None:
                update.copied = update.source.kept
            arrays = update.marks, acc.residual, payload.bytes, kept_share, update.copied, acc.memory
            kernels.add_and_settle_packed(update.flat, sent, capacity, 1 / len(sent), *arrays)

    def settle(self, residual: Tensor, payload: Payload, update: Update, kept_share: float = 0.0) -> None:
        arrays = payload["blocks"], payload["entries"], payload["header"]
        kernels.settle_packed(residual, *arrays, update.flat, _sizes(payload)[1], kept_share)

    def indices(self, payload: Payload, wanted: int, sender: str) -> Tensor:
        counts, exponents = payload["blocks"] & 0xFFFFFF, (payload["blocks"] >> 24) & 0xFF
        if (counts > kernels.BLOCK).any() or (exponents > LARGEST_EXPONENT).any():
            raise malformed(
                sender, f"a block holds more than {kernels.BLOCK} entries, or its exponent is above {LARGEST_EXPONENT}"
            )
        held = min(wanted, _sizes(payload)[1])
        if int(counts.sum()) != held:
            raise malformed(sender, f"its blocks count {int(counts.sum())} entries, but it holds {held}")
        read = self.read(payload)
        if int(read.header[1]) != int(payload["header"][1]):
            raise malformed(sender, "its indices are not as many as its blocks count, or lie outside the bucket")
        return read.indices[:held]


class Coarse(Codec):
    """The codec of wire=coarse: indices in the bits that they need, values in two."""

    def form(self, n: int, capacity: int) -> Form:
        return _coarse_form(n, capacity)

    def write(self, payload: Payload, values: Tensor, indices: Tensor, residual: Tensor | None) -> None:
        n, capacity = _sizes(payload)
        there = are_there(payload["header"], capacity)
        values = values.masked_fill(~there, 0.0)
        payload["indices"].copy_(ascending.pack(torch.where(there, indices, n - 1), n))
        coded, codes = means.pack(values, there)
        payload["means"].copy_(coded)
        payload["codes"].copy_(codes)
        if residual is not None:
            errors = (values - means.unpack(coded, codes, capacity)).masked_fill(~there, 0.0)
            add_entries(residual, torch.where(there, indices, 0), errors)

    def pack(self, taken: Taken, residual: Tensor | None) -> Payload:
        self.write(taken.payload, taken.unpacked.values, taken.unpacked.indices, residual)
        return taken.payload

    def read(self, payload: Payload) -> Entries:
        n, capacity = _sizes(payload)
        values = means.unpack(payload["means"], payload["codes"], capacity)
        values.masked_fill_(~are_there(payload["header"], capacity), 0.0)
        return Entries(values, ascending.unpack(payload["indices"], n, capacity).int(), payload["header"])

    def indices(self, payload: Payload, wanted: int, sender: str) -> Tensor:
        return self.read(payload).indices[:wanted]


def are_there(header: Tensor, capacity: int) -> Tensor:
    """Return a mask of the slots that hold an entry."""
    return torch.arange(capacity, device=header.device) < header[0]


@functools.lru_cache(maxsize=1024)
def _exact_form(capacity: int) -> Form:
    return (Field("header", torch.int32, 2), Field("values", torch.float32, capacity), Field("indices", torch.int32, capacity))


@functools.lru_cache(maxsize=1024)
def _compact_form(n: int, capacity: int) -> Form:
    return (
        Field("header", torch.int32, 2),
        Field("blocks", torch.int32, -(-n // kernels.BLOCK), n),
        Field("entries", torch.int32, kernels.packed_words(n, capacity), capacity),
    )


@functools.lru_cache(maxsize=1024)
def _coarse_form(n: int, capacity: int) -> Form:
    of_means, of_codes = means.lengths(capacity)
    return (
        Field("header", torch.int32, 2),
        Field("indices", torch.uint8, ascending.length(n, capacity), n),
        Field("means", torch.bfloat16, of_means, capacity),
        Field("codes", torch.uint8, of_codes, capacity),
    )


def _sizes(payload: Payload) -> tuple[int, int]:
    """Return the entries of a compact or coarse payload's bucket, and its capacity."""
    return payload.form[1].holds, payload.form[2].holds


EXACT, COMPACT, COARSE = Exact(), Compact(), Coarse()
# The codecs by the wire knob's values.
CODECS: dict[str, Codec] = {"compact": COMPACT, "exact": EXACT, "coarse": COARSE}


def wire_knob() -> Any:
    """Declare the knob that names a codec."""
    return knob(
        "compact", "compact: about 15 bits each, rounding errors stay in the residual; exact: 64; coarse: 11", choices=CODECS
    )


def ratio_knob() -> Any:
    """Declare the knob for the share of entries sent."""
    return knob(0.01, "share of entries sent; lower = fewer bytes, staler gradients", above=0, most=1)


def count_of(ratio: float, n: int) -> int:
    """Return the number of entries in this share of n: at least one."""
    return min(n, max(1, math.ceil(ratio * n)))


def check_indices(indices: Tensor, n: int, sender: str) -> None:
    """Raise if indices that came lie outside a bucket of n entries. Those on a GPU are not checked."""
    if indices.device.type == "cpu" and are_outside(indices, n).any():
        raise malformed(sender, f"it names indices outside the bucket of {n} entries")


def are_outside(indices: Tensor, n: int) -> Tensor:
    """Return a mask of the indices outside a bucket of n entries."""
    return (indices < 0) | (indices >= n)


def malformed(sender: str, fault: str) -> ValueError:
    return ValueError(f"the payload of {sender} is malformed: {fault}; run the same gradcomp on all ranks")
