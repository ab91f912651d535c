"""A machine profile: what the parts of a bucket's step cost on a machine that need not be here.

A part is known by the two messages before it and the one behind it: start>gather, start>gather>end, send>gather>end. Its
seconds are a sum over sizes: one for the part itself, the layers and the entries of its bucket, the entries beyond those that
caches hold, the payloads that it reads or makes for single ranks, and the bytes that have arrived. Seconds for each of these do
not depend on the ranks. Gradients are float32.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gradcomp.core.compressor import Layer
from gradcomp.core.requests import World
from gradcomp.prediction import peers
from gradcomp.prediction.mirror import Message
from gradcomp.prediction.trial import Bucket, without_warmup
from gradcomp.spec import make

TERMS = ("fixed", "layer", "entry", "beyond", "payload", "byte")

# The entries of a bucket that caches hold. Those beyond may cost more.
CACHED = 2**20

Shapes = Mapping[str, Sequence[int]]


class Costs(NamedTuple):
    """The seconds of a part for each of the sizes; or these sizes themselves."""

    fixed: float
    layer: float
    entry: float
    beyond: float
    payload: float
    byte: float

    def seconds(self, sizes: Costs) -> float:
        """Return the seconds of a part of these sizes."""
        return sum(each * size for each, size in zip(self, sizes, strict=True))


class Profile(NamedTuple):
    """A machine, and the costs of parts by spec and by the messages around them.

    predicted: no such machine has confirmed the times of kernels. host: where the host's work was timed, if elsewhere.
    """

    machine: str
    predicted: bool
    host: str
    costs: Mapping[str, Mapping[str, Costs]]

    def __str__(self) -> str:
        host = f"; host work timed on {self.host}" if self.host else ""
        if self.predicted:
            return f"kernels PREDICTED for an {self.machine}, no GPU has confirmed them{host}"
        return f"kernels timed on {self.machine}{host}, as its profile says"

    def missing(self, spec: str, shapes: Shapes) -> str | None:
        """Say what the profile lacks of a spec or peer. Return None if it has everything."""
        lacks = [key for key in keys_of(spec, shapes) if key not in self.costs]
        if not lacks:
            return None
        rules = len(keys_of(spec, shapes)) > 1
        return f"the profile of {self.machine} has no times of {lacks[0] if rules else 'it'}; it has {', '.join(self.costs)}"

    def priced(self, spec: str, buckets: Sequence[Bucket], shapes: Shapes, world: World) -> list[Bucket]:
        """Replace the seconds of buckets that were tried here."""
        found = []
        for bucket in buckets:
            costs, priced = self.costs[key_of(spec, bucket.names[0], shapes)], []
            for part, (role, sizes) in zip(bucket.parts, roles_of(bucket, shapes, world), strict=True):
                if role not in costs:
                    raise ValueError(
                        f"the profile of {self.machine} has no times of {spec} for {role}, which {world.size} ranks "
                        f"need; leave {spec} out of the specs"
                    )
                priced.append(part._replace(seconds=costs[role].seconds(sizes)))
            found.append(bucket._replace(parts=tuple(priced)))
        return found

    def json(self) -> dict[str, Any]:
        """Return the content of the file."""
        costs = {
            spec: {role: {term: float(f"{value:.4g}") for term, value in each._asdict().items() if value}
                   for role, each in roles.items()}
            for spec, roles in self.costs.items()
        }  # fmt: skip
        return {"machine": self.machine, "predicted": self.predicted, "host": self.host, "seconds": costs}


def roles_of(bucket: Bucket, shapes: Shapes, world: World) -> Iterator[tuple[str, Costs]]:
    """Name the messages around each part of a bucket, and return the part's sizes."""
    layers, entries = len(bucket.names), sum(torch.Size(shapes[name]).numel() for name in bucket.names)
    before: Message | None = None
    kinds = ["start"]
    for part in bucket.parts:
        payloads, size = _received(before, world)
        made = len(part.message.to) if part.message else 0
        kinds = [*kinds[-2:], part.message.kind if part.message else "end"]
        yield ">".join(kinds), Costs(1, layers, entries, max(0, entries - CACHED), payloads + made, size)
        before = part.message


def _received(message: Message | None, world: World) -> tuple[int, int]:
    """Return the payloads, and their bytes, that arrived for a message. A sum is as long as the bucket: none."""
    if message is None or message.kind == "reduce":
        return 0, 0
    if message.kind == "gather":
        return world.size, world.size * message.bytes
    return len(message.senders), len(message.senders) * message.bytes_in


def key_of(spec: str, name: str, shapes: Shapes) -> str:
    """Return the canonical spec, or the peer, that a layer is exchanged by."""
    if peers.is_peer(spec):
        return peers.STOCK if peers.ACCUMULATED.fullmatch(spec) else spec
    layer = Layer(torch.Size(shapes[name]).numel(), torch.device("cpu"), len(shapes[name]))
    return str(without_warmup(make(spec)).choose(name, layer))


def keys_of(spec: str, shapes: Shapes) -> list[str]:
    """Return the canonical specs that a model's layers are exchanged by."""
    return [] if spec == peers.NONE else list(dict.fromkeys(key_of(spec, name, shapes) for name in shapes))


def shipped() -> list[str]:
    """List the profiles that come with the package."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.json"))


def load(name: str | Path) -> Profile:
    """Read a profile: a file, or one that comes with the package, by its name."""
    path = Path(__file__).with_name(f"{name}.json") if str(name) in shipped() else Path(name)
    try:
        found = _read(json.loads(path.read_text()))
        if peers.STOCK not in found.costs or not peers.HALVES.keys() <= found.costs.keys():
            raise ValueError("it lacks stock, bf16 or fp16")
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{name} is no machine profile ({error}); write one by python -m gradcomp profile FILE, or name one of: "
            f"{', '.join(shipped())}"
        ) from None
    return found


def _read(content: Any) -> Profile:
    costs = {
        str(spec): {str(role): Costs(*(_number(terms, term) for term in TERMS)) for role, terms in roles.items()}
        for spec, roles in content["seconds"].items()
    }
    if not isinstance(content["predicted"], bool):
        raise ValueError("predicted is neither true nor false")
    return Profile(str(content["machine"]), content["predicted"], str(content["host"]), costs)


def _number(terms: Mapping[str, Any], term: str) -> float:
    if unknown := terms.keys() - {*TERMS}:
        raise ValueError(f"there is no term {min(unknown)!r}")
    value = float(terms.get(term, 0.0))
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{term} is {value:g} seconds")
    return value
