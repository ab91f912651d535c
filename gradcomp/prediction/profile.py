"""A machine profile: the costs of the parts of a bucket's step on a machine that need not be here.

A part is known by the two messages before it and the one behind it: start>gather, start>gather>end, send>gather>end. Its
seconds are a sum over sizes: one for the part itself, the layers and the entries of its bucket, the entries beyond those that
caches hold, the payloads that it reads or makes for single ranks, and the bytes that have arrived. Seconds for each of these do
not depend on the ranks. Gradients are float32.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from gradcomp.core.compressor import Layer
from gradcomp.core.requests import World
from gradcomp.prediction import measure
from gradcomp.prediction.recording_network import Bucket
from gradcomp.spec import make

# The profile that comes with the package.
H100 = "h100"

# The entries of a bucket that caches hold. Those beyond may cost more.
CACHED = 2**20

# The buckets that are measured: rows of each layer, which is square, layers, and ranks.
SIZES = (
    (64, 4, 2), (64, 64, 8), (128, 16, 32), (256, 4, 2), (256, 16, 8), (256, 16, 32), (512, 4, 8),
    (512, 12, 2), (512, 24, 2), (512, 24, 8), (512, 24, 32),
)  # fmt: skip

# A line gets a further term if it then misses the times by this share less, as a root of squares.
GAIN = 0.02

Shapes = Mapping[str, Sequence[int]]


class Costs(NamedTuple):
    """The seconds of a part for each of the sizes; or these sizes themselves."""

    fixed: float = 0.0
    layer: float = 0.0
    entry: float = 0.0
    beyond: float = 0.0
    payload: float = 0.0
    byte: float = 0.0

    def seconds(self, sizes: Costs) -> float:
        """Return the seconds of a part of these sizes."""
        return sum(each * size for each, size in zip(self, sizes, strict=True))


class Profile(NamedTuple):
    """A machine, and the costs of parts by spec and by the messages around them."""

    machine: str
    costs: Mapping[str, Mapping[str, Costs]]

    def __str__(self) -> str:
        return f"kernels timed on {self.machine}, as its profile says"

    def lacks(self, spec: str, shapes: Shapes) -> bool:
        """Decide whether the profile lacks a spec or baseline of some layers."""
        return spec != measure.NONE and any(_key_of(spec, name, shapes) not in self.costs for name in shapes)

    def priced(self, spec: str, buckets: Sequence[Bucket], shapes: Shapes, world: World) -> list[Bucket]:
        """Replace the seconds of buckets that were measured here."""
        found = []
        for bucket in buckets:
            costs, priced = self.costs[_key_of(spec, bucket.names[0], shapes)], []
            for part, (role, sizes) in zip(bucket.parts, roles_of(bucket, shapes, world), strict=True):
                if role not in costs:
                    raise ValueError(
                        f"the profile of {self.machine} has no times of {spec} for {role}, which {world.size} ranks "
                        f"need; leave {spec} out of the specs"
                    )
                priced.append(part._replace(seconds=costs[role].seconds(sizes)))
            found.append(bucket._replace(parts=tuple(priced)))
        return found

    def text(self) -> str:
        """Return the content of the file: JSON with a line for each part."""
        seconds = {
            spec: {role: {term: float(f"{value:.4g}") for term, value in each._asdict().items() if value}
                   for role, each in roles.items()}
            for spec, roles in self.costs.items()
        }  # fmt: skip
        wide = json.dumps({"machine": self.machine, "seconds": seconds}, indent=1)
        return re.sub(r"{[^{}]*}", lambda found: " ".join(found[0].split()).replace("{ ", "{").replace(" }", "}"), wide) + "\n"


def load(name: str | Path) -> Profile:
    """Read a profile: a file, or the one that comes with the package, by its name."""
    try:
        content = json.loads((Path(__file__).with_name("h100.json") if str(name) == H100 else Path(name)).read_text())
        costs = {spec: {role: Costs(**terms) for role, terms in roles.items()} for spec, roles in content["seconds"].items()}
        for each in (each for roles in costs.values() for each in roles.values()):
            if not all(0 <= seconds < math.inf for seconds in each):
                raise ValueError(f"{min(each):g} seconds")
        if not {measure.STOCK, *measure.HALVES} <= costs.keys():
            raise ValueError("it lacks stock, bf16 or fp16")
        return Profile(str(content["machine"]), costs)
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{name} is no machine profile ({error}); write one by python -m gradcomp profile FILE, or name the one of an "
            f"H100: {H100}"
        ) from None


def profile_here(
    specs: Iterable[str], machine: str, device: torch.device, tell: Callable[[str, float], None] | None = None
) -> Profile:
    """Make a profile of this machine. specs: those that it is to have, beside stock, bf16 and fp16."""
    costs = {}
    wanted = list(dict.fromkeys([measure.STOCK, *measure.HALVES, *specs]))
    for done, spec in enumerate(wanted):
        if tell is not None:
            tell(spec, done / len(wanted))
        costs[_key_of(spec, "0", {"0": (2, 2)})] = _lines_of(spec, device)
    return Profile(machine, costs)


def _key_of(spec: str, name: str, shapes: Shapes) -> str:
    """Return the canonical spec, or the baseline, that a layer is exchanged by."""
    if measure.is_baseline(spec):
        return measure.STOCK if measure.accumulated(spec) else spec
    layer = Layer(torch.Size(shapes[name]).numel(), torch.device("cpu"), len(shapes[name]))
    return str(measure.without_warmup(make(spec)).choose(name, layer))


def roles_of(bucket: Bucket, shapes: Shapes, world: World) -> Iterator[tuple[str, Costs]]:
    """Name the messages around each part of a bucket, and return the part's sizes."""
    layers, entries = len(bucket.names), sum(torch.Size(shapes[name]).numel() for name in bucket.names)
    arrived, size = 0, 0
    kinds = ["start"]
    for part in bucket.parts:
        message = part.message
        kinds = [*kinds[-2:], message.kind if message else "end"]
        payloads = arrived + (len(message.to) if message else 0)
        yield ">".join(kinds), Costs(1, layers, entries, max(0, entries - CACHED), payloads, arrived * size)
        if message is not None and message.kind == "gather":
            arrived, size = world.size, message.bytes
        elif message is not None:  # a sum is as long as the bucket: no payload
            arrived, size = len(message.senders), message.bytes_in


def _lines_of(spec: str, device: torch.device) -> dict[str, Costs]:
    """Measure buckets of several sizes, and fit a line to the seconds of each part."""
    points: dict[str, list[Any]] = {}
    for rows, layers, ranks in SIZES:
        shapes = {str(i): (rows, rows) for i in range(layers)}
        world = World(0, ranks, tuple(range(ranks)))
        for bucket in measure.measure(spec, shapes, world, 1e6, device, None, measure.SECONDS):
            # Parts between messages of the same kinds are counted together: their sum is what matters.
            sums: dict[str, Any] = defaultdict(lambda: np.zeros(len(Costs._fields) + 1))
            for part, (role, sizes) in zip(bucket.parts, roles_of(bucket, shapes, world), strict=True):
                sums[role] += (*sizes, part.seconds)
            for role, point in sums.items():
                points.setdefault(role, []).append(point)
    return {role: fit(np.stack(each)) for role, each in points.items()}


def fit(points: Any) -> Costs:
    """Fit a line without negative terms, by shares of the seconds: a small bucket counts as much as a large one.

    points: an array with a row of sizes and, last, their seconds for each bucket.
    """
    sizes = points[:, :-1] / np.maximum(points[:, -1:], 1e-7)
    chosen = [i for i in range(sizes.shape[1]) if sizes[:, i].any()]
    best, least = np.zeros(sizes.shape[1]), np.inf
    for count in range(1, len(chosen) + 1):
        bound = least - GAIN
        for columns in itertools.combinations(chosen, count):
            scale = sizes[:, columns].max(axis=0)
            found = np.linalg.lstsq(sizes[:, columns] / scale, np.ones(len(points)), rcond=None)[0] / scale
            error = float(np.sqrt(np.mean((sizes[:, columns] @ found - 1) ** 2)))
            if (found >= 0).all() and error < min(bound, least):
                best, least = np.zeros(sizes.shape[1]), error
                best[list(columns)] = found
    return Costs(*map(float, best))
