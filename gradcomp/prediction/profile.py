"""The profile of a machine that need not be here: the costs of the parts of a bucket's step.

A part is known by the two messages before it and the one behind it: start>gather, start>gather>end, send>gather>end. Its
seconds are a sum over sizes: one for the part itself, the layers and the entries of its bucket, the payloads that it reads or
makes for single ranks, and the bytes that have arrived. Seconds for each of these do not depend on the ranks. Gradients are
float32.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from gradcomp.core.compressor import Layer
from gradcomp.core.requests import World
from gradcomp.prediction import measure
from gradcomp.prediction.recording_network import Bucket
from gradcomp.spec import make

# The profile that comes with the package.
H100 = "h100"

Shapes = Mapping[str, Sequence[int]]

# A number for each size of a part: the size, or the seconds that one of it takes.
Sizes = Mapping[str, float]


class Profile(NamedTuple):
    """A machine, and the seconds of parts by spec, by the messages around them, and by size."""

    machine: str
    seconds: Mapping[str, Mapping[str, Sizes]]

    def __str__(self) -> str:
        return f"kernels of {self.machine}, as its profile says"

    def lacks(self, spec: str, shapes: Shapes) -> bool:
        """Decide whether the profile lacks a spec or baseline of some layers."""
        return spec != measure.NONE and any(_key_of(spec, name, shapes) not in self.seconds for name in shapes)

    def priced(self, spec: str, buckets: Sequence[Bucket], shapes: Shapes, world: World) -> list[Bucket]:
        """Replace the seconds of buckets that were measured here."""
        found = []
        for bucket in buckets:
            seconds, priced = self.seconds[_key_of(spec, bucket.names[0], shapes)], []
            for part, (role, sizes) in zip(bucket.parts, roles_of(bucket, shapes, world), strict=True):
                if role not in seconds:
                    raise ValueError(
                        f"the profile of {self.machine} has no times of {spec} for {role}, which {world.size} ranks "
                        f"need; leave {spec} out of the specs"
                    )
                priced.append(part._replace(seconds=sum(each * sizes[size] for size, each in seconds[role].items())))
            found.append(bucket._replace(parts=tuple(priced)))
        return found


def load(name: str) -> Profile:
    """Read the profile that comes with the package, by its name."""
    if name != H100:
        raise ValueError(f"there is no profile {name!r}; write {H100}, or leave the profile out: kernels are then timed here")
    return Profile(**json.loads(Path(__file__).with_name(f"{H100}.json").read_text()))


def _key_of(spec: str, name: str, shapes: Shapes) -> str:
    """Return the canonical spec, or the baseline, that a layer is exchanged by."""
    if measure.is_baseline(spec):
        return measure.STOCK if measure.accumulated(spec) else spec
    layer = Layer(torch.Size(shapes[name]).numel(), torch.device("cpu"), len(shapes[name]))
    return str(measure.without_warmup(make(spec)).choose(name, layer))


def roles_of(bucket: Bucket, shapes: Shapes, world: World) -> Iterator[tuple[str, Sizes]]:
    """Name the messages around each part of a bucket, and return the part's sizes."""
    layers, entries = len(bucket.names), sum(torch.Size(shapes[name]).numel() for name in bucket.names)
    arrived, size = 0, 0
    kinds = ["start"]
    for part in bucket.parts:
        message = part.message
        kinds = [*kinds[-2:], message.kind if message else "end"]
        payloads = arrived + (len(message.to) if message else 0)
        sizes = {"fixed": 1, "layer": layers, "entry": entries, "payload": payloads, "byte": arrived * size}
        yield ">".join(kinds), sizes
        if message is not None and message.kind == "gather":
            arrived, size = world.size, message.bytes
        elif message is not None:  # a sum is as long as the bucket: no payload
            arrived, size = len(message.senders), message.bytes_in
