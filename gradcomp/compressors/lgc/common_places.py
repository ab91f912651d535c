"""Which entries all ranks send alike: those that are largest with the rank that leads, of whom there is one at a time, or each.

Where every rank leads it does so for a part of the entries, in turn, so that all send as much. Entries are put in the order of
their leader's values, as far as bands of like values are told apart: what then varies smoothly along them takes few numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gradcomp.exchanges.split import Partition
from gradcomp.messages import payload as payloads
from gradcomp.messages import places
from gradcomp.messages.sparse import count_of
from gradcomp.native import kernels
from gradcomp.native.extension import LINE
from gradcomp.native.memory import Memory
from gradcomp.requests import Asking, Field, Form, Payload, World, gather, send

LEADERS = ("parts", "rotate", "seed")


class Support(NamedTuple):
    """Places [rows, k] that all ranks know, in one order; row by row the root mean square of what its leader has there, and who
    that is; and, where the leaders were to add codes of theirs, these, [rows, ...]."""

    places: Tensor
    scales: Tensor
    leaders: list[int]
    codes: Tensor | None = None

    def of(self, residual: Tensor) -> Tensor:
        """What stands there, [rows, k]."""
        return residual.index_select(0, self.places.flatten()).view(self.places.shape)

    def write(self, residual: Tensor, rows: Tensor) -> None:
        """residual <- rows, there."""
        residual.index_copy_(0, self.places.flatten(), rows.flatten())


class Leading:
    """The rows of a step's support, each of them of one leader: how long they are, and who it is."""

    def __init__(self, n: int, ratio: float, who: str, bands: int, packed: bool, seed: int, world: World, step: int):
        self.world, self.packed = world, packed
        ranks = world.size if who == "parts" and n >= LINE * world.size else 1
        self.parts = Partition(n, ranks)
        self.k = min(count_of(ratio, -(-n // ranks)), n // (ranks * LINE) * LINE if ranks > 1 else n)
        self.bands = min(bands, self.k)
        first = _drawn(seed, step, world.size) if who == "seed" else step % world.size
        self.leaders = [(first + row) % world.size for row in range(ranks)]

    @property
    def span(self) -> int:
        """Of how many numbers a place in a band is one."""
        return self.bands * self.parts.size

    def form(self, code: Field | None = None) -> Form:
        coded = Field("places", torch.uint8, places.length(self.span, self.k))
        where = coded if self.packed else Field("places", torch.int32, self.k)
        return (Field("scale", torch.float32, 1), where, *(() if code is None else (code,)))

    def choose(self, residual: Tensor, memory: Memory) -> dict[str, Tensor]:
        """The places of the row that this rank leads, and its scale. Of another row there is nothing."""
        if self.world.rank not in self.leaders:
            return {}
        part = self.parts.copy(self.leaders.index(self.world.rank), residual, memory)
        values, found = part.new_empty(self.k), torch.empty(self.k, dtype=torch.int32, device=part.device)
        kernels.take_topk(part, self.k, values, found, torch.empty(2, dtype=torch.int32, device=part.device), memory=memory)
        bands = torch.empty_like(found, dtype=torch.int64)
        bands[values.argsort(stable=True)] = torch.arange(self.k, device=part.device) * self.bands // self.k
        keys = (bands * self.parts.size + found).sort().values
        scale = values.double().square().mean().sqrt().clamp(min=torch.finfo(torch.float32).tiny)
        return {
            "scale": scale.float().view(1),
            "places": places.pack(keys, self.span) if self.packed else (keys % self.parts.size).int(),
        }

    def places_of(self, chosen: Tensor, row: int) -> Tensor:
        """Where in value those places of a row are."""
        keys = places.unpack(chosen, self.span, self.k) if self.packed else chosen.long()
        return self.parts.places(row, keys % self.parts.size).clamp(0, self.parts.n - 1)

    def share(self, own: dict[str, Tensor], form: Form, device: torch.device) -> Asking[list[Payload]]:
        """Every row's payload, from its leader to everybody."""
        payload = payloads.empty(form, device)
        for name, array in own.items():
            payload[name].copy_(array.flatten())
        if len(self.leaders) > 1:
            replies = yield from gather(payload)
            return [replies[leader] for leader in self.leaders]
        (leader,) = self.leaders
        parts = dict.fromkeys(self.world.others, payload) if own else {}
        came = yield from send(parts, () if own else (leader,), form, device)
        return [payload if own else came[leader]]


def _drawn(seed: int, step: int, ranks: int) -> int:
    """A rank by chance, the same one on all of them."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**63)
    return int(torch.randint(ranks, (), generator=generator))
