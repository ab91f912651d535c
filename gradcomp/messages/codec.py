"""What the codecs of sparse entries have in common: entries, taken ones, and the ways to take, pack, add and settle them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from gradcomp.core.compressor import Acc
from gradcomp.core.requests import Form, Payload
from gradcomp.native import kernels
from gradcomp.native.memory import Update

# Receives a step's payloads. Their headers count the entries that wanted to travel.
CountObserver = Callable[[Sequence[Payload]], None]


class Entries(NamedTuple):
    """Sparse entries: values, places and header.

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
    """A codec of sparse entries. The two subclasses hold all that differs between them."""

    @abstractmethod
    def form(self, n: int, capacity: int) -> Form:
        """Describe a payload of this capacity for a bucket of n entries."""

    @abstractmethod
    def allocate(self, acc: Acc, capacity: int) -> Taken:
        """Allocate for `capacity` of acc's entries. A take kernel must fill them in before the caller yields."""

    @abstractmethod
    def write(self, payload: Payload, values: Tensor, indices: Tensor, residual: Tensor | None) -> None:
        """Write entries into a payload with a filled header. Add the rounding error to the residual, if given."""

    @abstractmethod
    def pack(self, taken: Taken, residual: Tensor | None) -> Payload:
        """Pack the taken entries into their payload. Add the rounding error to the residual, if given."""

    @abstractmethod
    def read(self, payload: Payload) -> Entries:
        """Read the entries of a payload. COMPACT sets the header's flag if the payload is malformed."""

    @abstractmethod
    def add(self, update: Update, received: Sequence[Payload], scale: float = 1.0) -> None:
        """Add payloads, one after the other. The update's first entry becomes NaN if one is flagged or malformed."""

    @abstractmethod
    def settle(self, residual: Tensor, payload: Payload, update: Update, kept_share: float = 0.0) -> None:
        """Put kept_share times the sent entries back into the residual; put all of them back if the update is not finite."""

    @abstractmethod
    def places(self, payload: Payload, wanted: int, sender: str) -> Tensor:
        """Return the places that a payload names. They are unchecked and may lie outside the bucket."""

    def take(self, acc: Acc, k: int, mask: kernels.Mask | None = None, packs: bool = False) -> Taken:
        """Move the k largest entries out of acc, in index order. The mask, if given, notes them.

        packs: pack them in the same call, if the codec can; their rounding error then stays in the residual.
        """
        taken = self.allocate(acc, k)
        kernels.take_topk(acc.residual, k, *taken.unpacked, mask, acc.flag, acc.peaks, acc.memory)
        return taken

    def take_above(
        self, acc: Acc, capacity: int, bar: kernels.Bar, mask: kernels.Mask | None = None, packs: bool = False
    ) -> Taken:
        """Move the entries above the bar out of acc, at most `capacity`, and steer the bar. mask, packs: see take()."""
        options = {"from_zero": bar.from_zero, "live": bar.live, "pooled": bar.pooled}
        kernels.set_thresholds(bar.moments, bar.ends, bar.lam, bar.thresholds, **options)
        taken = self.allocate(acc, capacity)
        layers = bar.ends, bar.thresholds
        kernels.take_above(acc.residual, *layers, *taken.unpacked, mask, acc.flag, acc.peaks, acc.memory)
        if bar.target is not None:
            kernels.steer(bar.lam, taken.unpacked.header, bar.target)
        return taken

    def add_and_settle(
        self,
        update: Update,
        received: Sequence[Payload],
        scale: float,
        residual: Tensor,
        payload: Payload,
        kept_share: float = 0.0,
    ) -> None:
        """Add the payloads of all ranks to the update, and settle this rank's own."""
        self.add(update, received, scale)
        self.settle(residual, payload, update, kept_share)

    def check(self, received: Mapping[int, Payload], update: Update, n: int) -> None:
        """Raise if a payload is malformed, and name its rank. Finite updates, and those on a GPU, are not checked."""
        if not update.flat.is_cuda and not math.isfinite(update.first):
            for rank, payload in received.items():
                self.check_one(payload, n, f"rank {rank}")

    def check_one(self, payload: Payload, n: int, sender: str) -> None:
        """Raise if a payload for a bucket of n entries is malformed."""
        wanted, flag = payload["header"].tolist()
        if wanted < 0 or flag not in (0, 1):
            raise malformed(sender, f"its header holds the count {wanted} and the flag {flag}")
        check_places(self.places(payload, wanted, sender), n, sender)


def check_places(places: Tensor, n: int, sender: str) -> None:
    """Raise if places that came lie outside a bucket of n entries. Those on a GPU are not checked."""
    if places.device.type == "cpu" and are_outside(places, n).any():
        raise malformed(sender, f"it names places outside the bucket of {n} entries")


def are_outside(places: Tensor, n: int) -> Tensor:
    """Return a mask of the places outside a bucket of n entries."""
    return (places < 0) | (places >= n)


def malformed(sender: str, fault: str) -> ValueError:
    return ValueError(f"the payload of {sender} is malformed: {fault}; run the same gradcomp on all ranks")
