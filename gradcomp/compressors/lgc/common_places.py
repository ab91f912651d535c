"""The places that all ranks send alike: those of a leader's largest entries. One rank leads in each step, or each leads a part.

leader=parts: each rank leads one part, another one in each step, and all ranks send equally many bytes. Entries are sorted into
bands by their leader's values. They then vary smoothly along a row, so few numbers are enough to code it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gradcomp.core.requests import Field, Form, Payload, Requests, World, gather, send
from gradcomp.exchanges.split import Partition
from gradcomp.messages import payload as payloads
from gradcomp.messages import places
from gradcomp.messages.sparse import count_of
from gradcomp.native import kernels
from gradcomp.native.extension import LINE
from gradcomp.native.memory import Memory

# parts: each rank leads a part; rotate: one leader in turn; seed: one leader at random.
LEADERS = ("parts", "rotate", "seed")


class CommonPlaces(NamedTuple):
    """Places [rows, k] that all ranks know, in the same order.

    scales: the root mean square of the leader's entries in each row, [rows, 1]. leaders: the rank that leads each row.
    codes: the leaders' codes, [rows, channels, places], if codes travel with the places.
    """

    places: Tensor
    scales: Tensor
    leaders: list[int]
    codes: Tensor | None = None

    def read(self, flat: Tensor) -> Tensor:
        """Return the entries at these places, [rows, k]."""
        return flat.index_select(0, self.places.flatten()).view(self.places.shape)

    def write(self, flat: Tensor, rows: Tensor) -> None:
        """Set the entries at these places."""
        flat.index_copy_(0, self.places.flatten(), rows.flatten())


class PlaceSelection:
    """The selection of one step's common places: the leader of each row, and the length k of a row.

    n: entries to select from. leader: one of LEADERS. bands: at most this many. packed: places travel in few bits.
    """

    def __init__(
        self, n: int, world: World, step: int, *, ratio: float, leader: str, bands: int, packed: bool, seed: int
    ) -> None:
        self.world, self.packed = world, packed
        rows = world.size if leader == "parts" and n >= LINE * world.size else 1
        self.parts = Partition(n, rows)
        self.k = min(count_of(ratio, -(-n // rows)), n // (rows * LINE) * LINE if rows > 1 else n)
        self.bands = min(bands, self.k)
        first = _draw_rank(seed, step, world.size) if leader == "seed" else step % world.size
        self.leaders = [(first + row) % world.size for row in range(rows)]

    @property
    def key_limit(self) -> int:
        """Return the limit of a place's key, band * part size + place in the part."""
        return self.bands * self.parts.size

    def form(self, code: Field | None = None) -> Form:
        """Describe a row's payload. code: the field of the leader's code, if it travels."""
        packed = Field("places", torch.uint8, places.length(self.key_limit, self.k))
        field = packed if self.packed else Field("places", torch.int32, self.k)
        return (Field("scale", torch.float32, 1), field, *(() if code is None else (code,)))

    def choose(self, residual: Tensor, memory: Memory) -> dict[str, Tensor]:
        """Choose the places and the scale of the row that this rank leads. Return nothing on a rank that does not lead."""
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
            "places": places.pack(keys, self.key_limit) if self.packed else (keys % self.parts.size).int(),
        }

    def locate(self, chosen: Tensor, row: int) -> Tensor:
        """Map the chosen places of a row, as they travel, to places among the n entries."""
        keys = places.unpack(chosen, self.key_limit, self.k) if self.packed else chosen.long()
        return self.parts.places(row, keys % self.parts.size).clamp(0, self.parts.n - 1)

    def share(self, chosen: dict[str, Tensor], form: Form, device: torch.device) -> Requests[list[Payload]]:
        """Send each row's payload from its leader to all ranks. chosen: this rank's row; empty on a rank that does not lead."""
        payload = payloads.empty(form, device)
        for name, array in chosen.items():
            payload[name].copy_(array.flatten())
        if len(self.leaders) > 1:
            replies = yield from gather(payload)
            return [replies[leader] for leader in self.leaders]
        (leader,) = self.leaders
        sent = dict.fromkeys(self.world.others, payload) if chosen else {}
        received = yield from send(sent, () if chosen else (leader,), form, device)
        return [payload if chosen else received[leader]]


def _draw_rank(seed: int, step: int, ranks: int) -> int:
    """Draw a rank at random, the same on all ranks."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**63)
    return int(torch.randint(ranks, (), generator=generator))
