"""The forecast: what a step would take by each way, from kernels that this rank times and links that all have measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from gradcomp.choosing.ways import Way
from gradcomp.engine.wrappers.by_host import ByHost
from gradcomp.engine.wrappers.host_part import position_of
from gradcomp.engine.wrappers.wrapper import Wrapper
from gradcomp.exchanges.rounded import Rounded
from gradcomp.prediction import peers, timeline
from gradcomp.prediction.link import Times
from gradcomp.prediction.mirror import Message
from gradcomp.prediction.timeline import Work
from gradcomp.prediction.trial import Bucket, Effort, Part, try_out
from gradcomp.protocol import Compressor, Layer
from gradcomp.requests import World
from gradcomp.spec import make

# A trial of kernels takes this long.
EFFORT = Effort(settling=2, counted=2, seconds=0.0)
# The entries of a trial, at most. Larger models are tried with smaller layers, and the times are multiplied.
MOST_ENTRIES = 2**19

# The bytes of a group of layers, at least, and the groups, at most.
GROUP, GROUPS = 8e6, 4

# A gentler way for a group of layers is taken if the step gets no longer than this.
NO_LONGER = 1.01


class Forecast:
    """The forecast of one rank for one model. Kernels are timed once for each way.

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
        return self._step(self._of_groups.get(way) or [way.tried_as] * len(self.groups), work, times)

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

    def _step(self, specs: Sequence[str], work: Work, times: Times) -> float:
        buckets = [bucket for i, spec in enumerate(specs) for bucket in self._buckets(spec, i)]
        return timeline.step(work, buckets, times, self.world).seconds

    def _buckets(self, spec: str, group: int) -> list[Bucket]:
        if (spec, group) not in self._tried:
            self._tried[spec, group] = self._try(spec, self.groups[group])
        return self._tried[spec, group]

    def _try(self, spec: str, names: Sequence[str]) -> list[Bucket]:
        sizes = {name: self._layers[name].size for name in reversed(names)}  # in the model's order
        total, device = sum(sizes.values()), self._layers[names[0]].device
        part = min(1.0, MOST_ENTRIES / total)
        shapes = {name: _shape(max(1, round(size * part)), self._layers[name].dims) for name, size in sizes.items()}
        less = sum(torch.Size(shape).numel() for shape in shapes.values()) / total
        if peers.is_peer(spec):
            tried = peers.buckets_of(spec, shapes, device, self._types)
        else:
            of_bucket = min(total, max(int(self._bucket_mb * 1e6 / 4), *sizes.values()))
            spec = str(with_route(make(spec), of_bucket, self.world))
            tried = try_out(spec, shapes, self.world, less * self._bucket_mb, device, EFFORT, self._types)
        return [Bucket(bucket.names, tuple(_multiplied(part, 1 / less) for part in bucket.parts)) for bucket in tried]


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


def _multiplied(part: Part, factor: float) -> Part:
    if factor == 1 or part.message is None:
        return Part(part.seconds * factor, part.message)
    message = part.message
    to = {rank: round(size * factor) for rank, size in message.to.items()}
    larger = Message(message.kind, round(message.bytes * factor), to, message.senders, round(message.bytes_in * factor))
    return Part(part.seconds * factor, larger)
