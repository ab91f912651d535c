"""A rank's part of a bucket, where the ranks of a host act as one sender: its place among the hosts, and its state."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradcomp.core.compressor import Compressor, Layout
from gradcomp.core.requests import Field, Form, Payload, World
from gradcomp.messages import payload as payloads
from gradcomp.native import kernels
from gradcomp.native.extension import MOMENTS
from gradcomp.saved import check_int, entry, read_int, read_ints, table_or_empty


class Position(NamedTuple):
    """A rank's position among the hosts.

    neighbours: the ranks of its host, in the order of their parts. part: the part that it owns.
    peers: the owners of the same part, one on each host. peer_world: the world of the peers. hosts: the host of every rank,
    numbered in the order of ranks.
    """

    neighbours: tuple[int, ...]
    part: int
    peers: tuple[int, ...]
    peer_world: World
    hosts: tuple[int, ...]

    @property
    def host_world(self) -> World:
        """The world of the ranks of this host, in the order of their parts."""
        return World(self.part, len(self.neighbours))


@functools.cache
def position_of(world: World) -> Position:
    """Find a rank's position. Refuse hosts with different numbers of ranks."""
    hosts = world.hosts if world.hosts is not None else tuple(range(world.size))
    ranks_of: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks_of.setdefault(host, []).append(rank)
    counts = [len(ranks) for ranks in ranks_of.values()]
    if len(set(counts)) > 1:
        raise ValueError(
            f"by_host=true needs as many ranks on every host, but the hosts have {', '.join(map(str, counts))}; start the same "
            "number on each"
        )
    neighbours = ranks_of[hosts[world.rank]]
    part = neighbours.index(world.rank)
    peers = tuple(ranks[part] for ranks in ranks_of.values())
    numbers = {host: number for number, host in enumerate(ranks_of)}
    return Position(
        tuple(neighbours), part, peers, World(peers.index(world.rank), len(peers)), tuple(numbers[host] for host in hosts)
    )


class PartState:
    """The state of this rank's part of a bucket. move_to() makes it anew whenever the rank's position changes.

    All parts are equally long, so that all ranks yield the same requests. Zeros fill up a last part that is shorter.
    """

    def __init__(self, layout: Layout, seed: int):
        self.layout, self.seed = layout, seed
        self.position: Position | None = None
        self.saved: Mapping[str, Any] | None = None
        self.inner: Any = None
        self.exchanges = 0  # since the inner state was made
        self.part_layout = layout
        self.moments: Tensor | None = None
        self.peaks: Tensor | None = None

    def move_to(self, inner: Compressor, position: Position) -> None:
        """Make the inner compressor's state if the position changed, and restore a saved state."""
        if position != self.position:
            self.position, self.exchanges = position, 0
            self.part_layout = self._layout_of(position.part, len(position.neighbours))
            self.inner = inner.init(self.part_layout, self.seed)
            if inner.traits.moments:
                layers = len(self.part_layout.names)
                self.moments = torch.zeros(layers, MOMENTS, dtype=torch.float64, device=self.layout.device)
            self.peaks = kernels.peaks(self.length, self.layout.device) if inner.traits.sparse else None
        self._restore(inner)

    def forget(self) -> None:
        """Make the inner state anew at the next exchange."""
        self.position = self.inner = self.saved = None
        self.exchanges = 0

    @property
    def place(self) -> list[int] | None:
        """Return the number of this rank's part and then the host of every rank, numbered; None before the first exchange.

        Either all ranks have their old places or none has, so that they restore their states together.
        """
        return None if self.position is None else [self.position.part, *self.position.hosts]

    def load(self, inner: Compressor, saved: Mapping[str, Any]) -> None:
        """Check a saved state, and restore it as soon as the rank's position is known."""
        read_int(saved, "exchanges")
        if entry(saved, "place") is not None:
            part, *hosts = place = read_ints(saved, "place") or [0]
            parts = hosts.count(0)  # as many ranks on every host
            check_int(part, "place", 0, parts - 1)
            own = table_or_empty(saved, "inner")
            if own:
                inner.load(inner.init(self._layout_of(part, parts), self.seed), own)
            saved = {**saved, "place": place, "inner": own}
        self.saved = dict(saved)
        if self.inner is not None:
            self._restore(inner)

    def _restore(self, inner: Compressor) -> None:
        """Load the saved state into the inner compressor's state, unless the rank has another part now."""
        if self.saved is None:
            return
        saved, self.saved = self.saved, None
        if saved.get("inner") and saved["place"] == self.place:
            inner.load(self.inner, saved["inner"])
            self.exchanges = saved["exchanges"]

    @property
    def length(self) -> int:
        """Return the number of entries of a part."""
        assert self.position is not None
        return self._length_of(len(self.position.neighbours))

    @property
    def form(self) -> Form:
        """Return the form of a part's payload: its entries, and a flag that is not 0 where a gradient was not finite."""
        return Field("flag", torch.int32, 1), Field("values", torch.float32, self.length)

    def slice(self, flat: Tensor, part: int) -> Tensor:
        """Slice a part out of the bucket's flat array. The last one may be shorter than a part, or empty."""
        return flat[part * self.length : (part + 1) * self.length]

    def padded(self, flat: Tensor, part: int) -> Tensor:
        """Return a part in its full length: a view of the bucket's array, or a copy that ends with zeros."""
        view = self.slice(flat, part)
        return view if len(view) == self.length else torch.nn.functional.pad(view, (0, self.length - len(view)))

    def payload(self, values: Tensor, flag: Tensor | None, scale: float = 1.0) -> Payload:
        """Write scale times a part into a payload."""
        payload = payloads.empty(self.form, values.device)
        payload["flag"].zero_()
        if flag is not None:
            payload["flag"].copy_(flag)
        torch.mul(values, scale, out=payload["values"])
        return payload

    def _length_of(self, parts: int) -> int:
        return -(-self.layout.total // parts)

    def _layout_of(self, part: int, parts: int) -> Layout:
        """Cut the layers to a part. The zeros that fill it up become one more layer."""
        length = self._length_of(parts)
        begin = part * length
        names, sizes = [], []
        for name, (first, end) in zip(self.layout.names, self.layout.spans, strict=True):
            inside = min(end, begin + length) - max(first, begin)
            if inside > 0:
                names.append(name)
                sizes.append(inside)
        if sum(sizes) < length:
            names.append("")
            sizes.append(length - sum(sizes))
        return Layout(tuple(names), tuple(sizes), self.layout.device)
