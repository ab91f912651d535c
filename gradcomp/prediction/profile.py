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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from gradcomp.core.compressor import Layer
from gradcomp.core.requests import World
from gradcomp.prediction import baselines
from gradcomp.prediction.measure import Bucket, without_warmup
from gradcomp.prediction.recording_network import Message
from gradcomp.spec import make

TERMS = ("fixed", "layer", "entry", "beyond", "payload", "byte")

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
# Measures the buckets of a spec or a baseline: (spec, shapes, world) -> buckets.
Measure = Callable[[str, dict[str, tuple[int, ...]], World], Sequence[Bucket]]


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

    host: where the host's work was timed, if elsewhere.
    """

    machine: str
    host: str
    costs: Mapping[str, Mapping[str, Costs]]

    def __str__(self) -> str:
        host = f"; host work timed on {self.host}" if self.host else ""
        return f"kernels timed on {self.machine}{host}, as its profile says"

    def missing(self, spec: str, shapes: Shapes) -> str | None:
        """Say what the profile lacks of a spec or baseline. Return None if it has everything."""
        keys = _keys_of(spec, shapes)
        lacks = [key for key in keys if key not in self.costs]
        if not lacks:
            return None
        return (
            f"the profile of {self.machine} has no times of {lacks[0] if len(keys) > 1 else 'it'}; it has "
            f"{', '.join(self.costs)}"
        )

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

    def json(self) -> dict[str, Any]:
        """Return the content of the file."""
        costs = {
            spec: {role: {term: float(f"{value:.4g}") for term, value in each._asdict().items() if value}
                   for role, each in roles.items()}
            for spec, roles in self.costs.items()
        }  # fmt: skip
        return {"machine": self.machine, "host": self.host, "seconds": costs}


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


def _key_of(spec: str, name: str, shapes: Shapes) -> str:
    """Return the canonical spec, or the baseline, that a layer is exchanged by."""
    if baselines.is_baseline(spec):
        return baselines.STOCK if baselines.ACCUMULATED.fullmatch(spec) else spec
    layer = Layer(torch.Size(shapes[name]).numel(), torch.device("cpu"), len(shapes[name]))
    return str(without_warmup(make(spec)).choose(name, layer))


def _keys_of(spec: str, shapes: Shapes) -> list[str]:
    """Return the canonical specs that a model's layers are exchanged by."""
    return [] if spec == baselines.NONE else list(dict.fromkeys(_key_of(spec, name, shapes) for name in shapes))


def shipped() -> list[str]:
    """List the profiles that come with the package."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.json"))


def load(name: str | Path) -> Profile:
    """Read a profile: a file, or one that comes with the package, by its name."""
    path = Path(__file__).with_name(f"{name}.json") if str(name) in shipped() else Path(name)
    try:
        content = json.loads(path.read_text())
        costs = {
            str(spec): {str(role): Costs(*(_number(terms, term) for term in TERMS)) for role, terms in roles.items()}
            for spec, roles in content["seconds"].items()
        }
        if not {baselines.STOCK, *baselines.HALVES} <= costs.keys():
            raise ValueError("it lacks stock, bf16 or fp16")
        return Profile(str(content["machine"]), str(content["host"]), costs)
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{name} is no machine profile ({error}); write one by python -m gradcomp profile FILE, or name one of: "
            f"{', '.join(shipped())}"
        ) from None


def _number(terms: Mapping[str, Any], term: str) -> float:
    if unknown := terms.keys() - {*TERMS}:
        raise ValueError(f"there is no term {min(unknown)!r}")
    value = float(terms.get(term, 0.0))
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{term} is {value:g} seconds")
    return value


# ---- A profile of this machine: single buckets of several sizes, and lines through their times


def profile_here(
    specs: Iterable[str], machine: str, measure: Measure, tell: Callable[[str, float], None] | None = None
) -> Profile:
    """Make a profile of this machine. specs: those that it is to have, beside stock, bf16 and fp16."""
    costs = {}
    wanted = list(dict.fromkeys([baselines.STOCK, *baselines.HALVES, *specs]))
    for done, spec in enumerate(wanted):
        if tell is not None:
            tell(spec, done / len(wanted))
        costs[_key_of(spec, "0", {"0": (2, 2)})] = lines_of(spec, SIZES, measure)
    return Profile(machine, "", costs)


def lines_of(spec: str, sizes: Sequence[tuple[int, int, int]], measure: Measure) -> dict[str, Costs]:
    """Measure buckets of these sizes, and fit a line to the seconds of each part."""
    points: dict[str, list[tuple[Costs, float]]] = {}
    for rows, layers, ranks in sizes:
        shapes: dict[str, tuple[int, ...]] = {str(i): (rows, rows) for i in range(layers)}
        world = World(0, ranks, tuple(range(ranks)))
        for bucket in measure(spec, shapes, world):
            # Parts between messages of the same kinds are counted together: their sum is what matters.
            sums: dict[str, tuple[Costs, float]] = {}
            for part, (role, each) in zip(bucket.parts, roles_of(bucket, shapes, world), strict=True):
                size, seconds = sums.get(role, (Costs(0, 0, 0, 0, 0, 0), 0.0))
                sums[role] = Costs(*map(sum, zip(size, each, strict=True))), seconds + part.seconds
            for role, point in sums.items():
                points.setdefault(role, []).append(point)
    return {role: fit(each) for role, each in points.items()}


def fit(points: Sequence[tuple[Costs, float]]) -> Costs:
    """Fit a line without negative terms, by shares of the seconds: a small bucket counts as much as a large one."""
    seconds = np.array([max(seconds, 1e-7) for _, seconds in points])
    sizes = np.array([size for size, _ in points]) / seconds[:, None]
    chosen = [i for i in range(len(TERMS)) if sizes[:, i].any()]
    best, least = np.zeros(len(TERMS)), np.inf
    for count in range(1, len(chosen) + 1):
        bound = least - GAIN
        for columns in itertools.combinations(chosen, count):
            scale = sizes[:, columns].max(axis=0)
            found = np.linalg.lstsq(sizes[:, columns] / scale, np.ones(len(points)), rcond=None)[0] / scale
            error = float(np.sqrt(np.mean((sizes[:, columns] @ found - 1) ** 2)))
            if (found >= 0).all() and error < min(bound, least):
                best, least = np.zeros(len(TERMS)), error
                best[list(columns)] = found
    return Costs(*map(float, best))
