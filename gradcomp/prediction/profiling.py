"""Makes a profile of this machine: trials of single buckets of several sizes, and lines through their times."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from gradcomp.core.requests import World
from gradcomp.prediction import peers
from gradcomp.prediction.predict import buckets_of
from gradcomp.prediction.profile import TERMS, Costs, Profile, key_of, roles_of
from gradcomp.prediction.trial import Bucket

# The buckets that are tried: rows of each layer, which is square, layers, and ranks.
SIZES = (
    (64, 4, 2), (64, 64, 8), (128, 16, 32), (256, 4, 2), (256, 16, 8), (256, 16, 32), (512, 4, 8),
    (512, 12, 2), (512, 24, 2), (512, 24, 8), (512, 24, 32),
)  # fmt: skip

# A line gets a further term if it then misses the times by this share less, as a root of squares.
GAIN = 0.02

# What is tried, and the times of one of its buckets: (spec, shapes, world) -> buckets.
Trial = Callable[[str, dict[str, tuple[int, ...]], World], Sequence[Bucket]]


def measure(
    specs: Iterable[str], machine: str, device: torch.device, tell: Callable[[str, float], None] | None = None
) -> Profile:
    """Measure a profile of this machine. specs: those that it is to have, beside stock, bf16 and fp16."""

    def tried(spec: str, shapes: dict[str, tuple[int, ...]], world: World) -> Sequence[Bucket]:
        return buckets_of(spec, shapes, world, 1e6, device)

    costs = {}
    wanted = list(dict.fromkeys([peers.STOCK, *peers.HALVES, *specs]))
    for done, spec in enumerate(wanted):
        if tell is not None:
            tell(spec, done / len(wanted))
        costs[key_of(spec, "0", {"0": (2, 2)})] = lines_of(spec, SIZES, tried)
    return Profile(machine, False, "", costs)


def lines_of(spec: str, sizes: Sequence[tuple[int, int, int]], tried: Trial, terms: Sequence[str] = TERMS) -> dict[str, Costs]:
    """Try buckets of these sizes, and fit a line to the seconds of each part. terms: those that the line may have."""
    points: dict[str, list[tuple[Costs, float]]] = {}
    for rows, layers, ranks in sizes:
        shapes: dict[str, tuple[int, ...]] = {str(i): (rows, rows) for i in range(layers)}
        world = World(0, ranks, tuple(range(ranks)))
        for bucket in tried(spec, shapes, world):
            # Parts between messages of the same kinds are counted together: their sum is what matters.
            sums: dict[str, tuple[Costs, float]] = {}
            for part, (role, each) in zip(bucket.parts, roles_of(bucket, shapes, world), strict=True):
                size, seconds = sums.get(role, (Costs(0, 0, 0, 0, 0, 0), 0.0))
                sums[role] = Costs(*map(sum, zip(size, each, strict=True))), seconds + part.seconds
            for role, point in sums.items():
                points.setdefault(role, []).append(point)
    return {role: fit(each, terms) for role, each in points.items()}


def fit(points: Sequence[tuple[Costs, float]], terms: Sequence[str] = TERMS) -> Costs:
    """Fit a line without negative terms, by shares of the seconds: a small bucket counts as much as a large one."""
    seconds = np.array([max(seconds, 1e-7) for _, seconds in points])
    sizes = np.array([size for size, _ in points]) / seconds[:, None]
    chosen = [i for i, term in enumerate(TERMS) if term in terms and sizes[:, i].any()]
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
