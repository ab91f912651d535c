"""The forecast: what a step would take by each way, from kernels that this rank times and links that all have measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from gradcomp.choosing.decision import NO_LONGER
from gradcomp.choosing.ways import Way
from gradcomp.core.by_host import ByHost
from gradcomp.core.compressor import Compressor, Layer
from gradcomp.core.host_part import position_of
from gradcomp.core.requests import World
from gradcomp.core.wrapper import Wrapper
from gradcomp.exchanges.rounded import Rounded
from gradcomp.prediction import peers, timeline
from gradcomp.prediction.link import Times
from gradcomp.prediction.mirror import Message
from gradcomp.prediction.timeline import Work
from gradcomp.prediction.trial import Bucket, Effort, Part, try_out
from gradcomp.spec import make

# A trial of kernels takes this long.
EFFORT = Effort(settling=2, counted=2, seconds=0.0)
# The entries of a trial, at most. Larger models are tried with smaller layers of two sizes, and the times extended: what layers
# and buckets take beside their entries is there once, whatever their size.
MOST_ENTRIES, SMALLER = 2**19, 4

# The bytes of a group of layers, at least, and the groups, at most.
GROUP, GROUPS = 8e6, 4


class Forecast:
    """The forecast of one rank for one model. Kernels are timed once for each way, and again when that is asked for.

    types: those of gradients by layer, float32 by default.
    """

    def __init__(
        self, layers: Mapping[str, Layer], bucket_mb: float, world: World, types: Mapping[str, torch.dtype] | None = None
    ):
        self.world, self._types = world, types
        self._layers = {name: layer for name, layer in layers.items() if layer.size}
        self._bucket_mb = bucket_mb
        self.groups = _groups(self._layers)
        self._tried: dict[tuple[str, int], list[Bucket]] = {}
        self._of_groups: dict[Way, list[str]] = {}

    def seconds(self, way: Way, work: Work, times: Times) -> float:
        """Return the time of a step."""
        return self._step(self._specs_of(way), work, times)

    def knows(self, way: Way) -> bool:
        """Return True if the kernels of a way have been timed. On all ranks alike."""
        return all((spec, i) in self._tried for i, spec in enumerate(self._specs_of(way)))

    def time_again(self, way: Way) -> None:
        """Time the kernels of a way again, and keep the shorter times: something else may have slowed the others down."""
        for i, spec in enumerate(self._specs_of(way)):
            before, now = self._buckets(spec, i), self._try(spec, self.groups[i])
            if [_form(bucket) for bucket in before] == [_form(bucket) for bucket in now]:
                now = [_shorter(*pair) for pair in zip(before, now, strict=True)]
            self._tried[spec, i] = now

    def by_group(self, ways: Sequence[Way], work: Work, times: Times) -> list[int]:
        """Find for each group of layers the gentlest of these ways with which a step is as short as with any other.

        ways: from the one that loses least, all of them compressors.
        """
        specs = [way.spec for way in ways]
        chosen = [min(specs, key=lambda spec: self._step([spec] * len(self.groups), work, times))] * len(self.groups)
        for _ in range(2):
            for i in range(len(self.groups)):
                by_spec = {spec: self._step([*chosen[:i], spec, *chosen[i + 1 :]], work, times) for spec in specs}
                least = min(by_spec.values())
                chosen[i] = next(spec for spec in specs if by_spec[spec] <= NO_LONGER * least)
        return [specs.index(spec) for spec in chosen]

    def mixed(self, chosen: Sequence[Way]) -> Way | None:
        """Make one way of a way for each group. Return None if they are all the same, or if a layer's name forbids it."""
        if len({*chosen}) == 1 or any({*name} & {*"*?[]=; "} for name in self._layers):
            return None
        rest = max(chosen, key=chosen.count)
        rules = [f"{name}={way.spec}" for way, group in zip(chosen, self.groups, strict=True) if way != rest for name in group]
        mixed = Way("; ".join([rest.spec, *rules]))
        self._of_groups[mixed] = [way.spec for way in chosen]
        return mixed

    def _specs_of(self, way: Way) -> Sequence[str]:
        return self._of_groups.get(way) or [way.tried_as] * len(self.groups)

    def _step(self, specs: Sequence[str], work: Work, times: Times) -> float:
        buckets = [bucket for i, spec in enumerate(specs) for bucket in self._buckets(spec, i)]
        return timeline.step(work, buckets, times, self.world).seconds

    def _buckets(self, spec: str, group: int) -> list[Bucket]:
        if (spec, group) not in self._tried:
            self._tried[spec, group] = self._try(spec, self.groups[group])
        return self._tried[spec, group]

    def _try(self, spec: str, names: Sequence[str]) -> list[Bucket]:
        total = sum(self._layers[name].size for name in names)
        less, tried = self._try_part(spec, names, min(1.0, MOST_ENTRIES / total))
        if less == 1:
            return tried
        least, short = self._try_part(spec, names, MOST_ENTRIES / SMALLER / total)
        if least >= less or [_form(bucket) for bucket in short] != [_form(bucket) for bucket in tried]:
            least, short = 0.0, [Bucket(each.names, tuple(Part(0.0, None) for _ in each.parts)) for each in tried]
        ends = [[*zip(each.parts, other.parts, strict=True)] for each, other in zip(tried, short, strict=True)]
        parts = [tuple(_extended(long, less, other, least) for long, other in pairs) for pairs in ends]
        return [Bucket(bucket.names, extended) for bucket, extended in zip(tried, parts, strict=True)]

    def _try_part(self, spec: str, names: Sequence[str], part: float) -> tuple[float, list[Bucket]]:
        """Try a way with layers and buckets of a part of their size. Return about that part, too."""
        sizes = {name: self._layers[name].size for name in reversed(names)}  # in the model's order
        total, device = sum(sizes.values()), self._layers[names[0]].device
        shapes = {name: _shape(max(1, round(size * part)), self._layers[name].dims) for name, size in sizes.items()}
        less = sum(torch.Size(shape).numel() for shape in shapes.values()) / total
        if peers.is_peer(spec):
            return less, peers.buckets_of(spec, shapes, device, self._types, less)
        of_bucket = min(total, max(int(self._bucket_mb * 1e6 / 4), *sizes.values()))
        spec = str(with_route(make(spec), of_bucket, self.world))
        return less, try_out(spec, shapes, self.world, less * self._bucket_mb, device, EFFORT, self._types)


def _groups(layers: Mapping[str, Layer]) -> list[tuple[str, ...]]:
    """Divide the layers into groups of about equal sizes, in the order in which backward reaches them."""
    total = 4 * sum(layer.size for layer in layers.values())
    count = max(1, min(GROUPS, int(total / GROUP)))
    groups: list[list[str]] = [[]]
    behind = 0
    for name in reversed(list(layers)):
        if behind >= total * len(groups) / count and len(groups) < count:
            groups.append([])
        groups[-1].append(name)
        behind += 4 * layers[name].size
    return [tuple(group) for group in groups]


def with_route(compressor: Compressor, entries: int, world: World) -> Compressor:
    """Fix the route of a bucket with so many entries: with fewer, as in a trial, it might be another one."""
    match compressor:
        case Rounded():
            given: Any = compressor
            routed: Compressor = replace(given, route=compressor.route_of(entries, world.size))
            return routed
        case ByHost() if world.shares_hosts:
            position = position_of(world)
            part = -(-entries // len(position.neighbours))
            return compressor.wrap(with_route(compressor.inner, part, position.peer_world))
        case Wrapper():
            return compressor.wrap(with_route(compressor.inner, entries, world))
    return compressor


def _shape(size: int, dims: int) -> tuple[int, ...]:
    return (size,) + (1,) * (dims - 1)


def _form(bucket: Bucket) -> tuple[tuple[str, ...], list[str | None]]:
    return bucket.names, [None if part.message is None else part.message.kind for part in bucket.parts]


def _shorter(one: Bucket, other: Bucket) -> Bucket:
    """Join two trials of a bucket: what other programs add to a kernel's time is never negative."""
    pairs = zip(one.parts, other.parts, strict=True)
    return Bucket(one.names, tuple(Part(min(a.seconds, b.seconds), b.message) for a, b in pairs))


def _extended(long: Part, less: float, short: Part, least: float) -> Part:
    """Extend a part to whole layers from two parts of them, `less` and `least`: its seconds on a line, its bytes in ratio."""
    seconds = long.seconds + max(0.0, long.seconds - short.seconds) * (1 - less) / (less - least)
    if (message := long.message) is None:
        return Part(seconds, None)
    to = {rank: round(size / less) for rank, size in message.to.items()}
    return Part(
        seconds, Message(message.kind, round(message.bytes / less), to, message.senders, round(message.bytes_in / less))
    )
