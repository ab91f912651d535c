"""Profiles of GPUs that no GPU has confirmed: kernels as prediction.py predicts them, and the host's work as timed on a CPU.

A part takes the host's work and the kernels' time, one after the other. They overlap on a GPU, so this is an upper bound. Each
launch counts as one of prediction.py. Parts of one rank's entries count an eighth of the kernels of a bucket, as with 8 ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from gradcomp.core.requests import World
from gradcomp.prediction import peers, profiling, trial
from gradcomp.prediction.profile import Costs, Profile
from gradcomp.prediction.trial import Bucket, Part
from gradcomp.spec import make
from laboratory.kernels import prediction as p
from laboratory.kernels.prediction import Gpu, Kernel


class Work(NamedTuple):
    """A part's kernels, by entry of the bucket and by byte that arrives, and its launches, also by payload and by layer."""

    kernels: tuple[Kernel, ...]
    launches: int
    by_byte: Kernel = Kernel(0)
    by_payload: int = 0
    by_layer: int = 0

    def costs(self, gpu: Gpu) -> Costs:
        """Predict the seconds on a GPU."""
        entry, byte = sum(kernel.seconds(gpu) for kernel in self.kernels), self.by_byte.seconds(gpu)
        fixed, payload, layer = (gpu.launch * count for count in (self.launches, self.by_payload, self.by_layer))
        return Costs(fixed, layer, entry, 0.0, payload, byte)


def _eighth(*kernels: Kernel) -> tuple[Kernel, ...]:
    return tuple(Kernel(*(each / 8 for each in kernel)) for kernel in kernels)


def _sparse(start: tuple[Kernel, ...], launches: int, ratio: float) -> dict[str, Work]:
    """Take and pack entries; add up all payloads, settle and spread. An entry on the wire has two bytes."""
    scattered = 80.0
    packed, settled = Kernel(28 * ratio), Kernel(scattered * ratio)
    return {
        "start>gather": Work((*start, packed), launches),
        "start>gather>end": Work((settled, Kernel(4)), 4, Kernel(scattered / 2)),
    }


def _levels(find: Kernel, round_: Kernel, add: Kernel, bytes_: float) -> dict[str, Work]:
    """Round to levels; add up all payloads, settle and spread. bytes_: of an entry on the wire."""
    start, added = (p.ADD, find, round_), Kernel(1, 12 / bytes_)
    return {
        "start>gather": Work(start, 6),
        "start>gather>end": Work((add, p.SPREAD), 2, added),
        "start>send": Work(start, 1, by_payload=5),
        "start>send>gather": Work(_eighth(add, find, round_, Kernel(12)), 12, added, 1),
        "send>gather>end": Work((add, add, p.SPREAD), 3, added, 2),
    }


def _half() -> dict[str, Work]:
    """Round to 16 bits by torch's operations: a copy, a difference, sums of payloads, and what is put back."""
    start, back, added = (p.FLATTEN, Kernel(6), Kernel(10)), Kernel(14), Kernel(5)
    return {
        "start>gather": Work(start, 4),
        "start>gather>end": Work((Kernel(4), back, p.SPREAD), 5, added, 3),
        "start>send": Work(start, 1, by_payload=3),
        "start>send>gather": Work(_eighth(Kernel(8), Kernel(6), Kernel(10), Kernel(12)), 12, added, 3),
        "send>gather>end": Work((Kernel(4), back, p.SPREAD), 3, added, 6),
    }


def _reduced(*casts: Kernel) -> dict[str, Work]:
    """Copy gradients into a bucket and out of it, layer by layer, with casts on both ways."""
    one_way = Work((Kernel(8), *casts), len(casts), by_layer=1)
    return {"start>reduce": one_way, "start>reduce>end": one_way}


CAST = Kernel(6)

# 15, 18, 8 and 5 launches of a bucket under topk, sdagc, orq and dense: docs/decisions/engine.md.
WORK: Mapping[str, Mapping[str, Work]] = {
    peers.STOCK: _reduced(),
    **{half: _reduced(CAST) for half in peers.HALVES},
    "dense": {
        "start>reduce": Work((p.FLATTEN, Kernel(8)), 3),
        "start>reduce>end": Work((Kernel(4), p.SPREAD), 2),
    },
    "half": _half(),
    "topk": _sparse((p.ADD, *p.TAKE), 11, 0.01),
    "topk:ratio=0.001": _sparse((p.ADD, *p.TAKE), 11, 0.001),
    "sdagc": _sparse((p.MEASURE, *p.TAKE_ABOVE), 14, 0.01),
    "orq": _levels(p.FIND_3, p.ROUND_3, p.ADD_3, 0.2),
    "orq:levels=5": _levels(p.FIND_5, p.ROUND_5, p.ADD_5, 0.3),
    "orq:levels=9": _levels(p.FIND_9, p.ROUND_9, p.ADD_9, 0.4),
    "bingrad": _levels(p.FIND_MEANS, p.ROUND_MEANS, p.ADD_2, 0.125),
}

# Buckets with nearly no entries, so that their times are the host's: rows of each layer, layers, ranks.
SIZES = tuple((4, layers, ranks) for layers in (4, 32, 160) for ranks in (2, 8, 32))
SIZES_OF_PARTS = tuple((8, layers, ranks) for layers in (16, 64) for ranks in (2, 4, 8))
TERMS = ("fixed", "layer", "payload")

# A part takes the least of as many trials: other work on the machine lengthens some.
TRIALS = 7


def host_costs(spec: str) -> dict[str, Costs]:
    """Time the host's work of each part on this machine's CPU."""
    if not any(role.startswith("start>send") for role in WORK[spec]):
        return profiling.lines_of(spec, SIZES, _tried, TERMS)
    join = "," if ":" in spec else ":"
    grouped = "" if spec == "half" else ",group=32"
    parts = profiling.lines_of(f"{spec}{join}route=alltoall{grouped}", SIZES_OF_PARTS, _tried, TERMS)
    whole = profiling.lines_of(f"{spec}{join}route=allgather", SIZES, _tried, TERMS)
    return {**parts, **whole}


def _tried(spec: str, shapes: dict[str, tuple[int, ...]], world: World) -> Sequence[Bucket]:
    device, effort = torch.device("cpu"), trial.Effort(counted=10, seconds=0.0)
    runs = [
        peers.buckets_of(spec, shapes, device)
        if peers.is_peer(spec)
        else trial.try_out(spec, shapes, world, 25, device, effort)
        for _ in range(TRIALS)
    ]
    return [
        Bucket(
            buckets[0].names,
            tuple(
                Part(min(part.seconds for part in parts), parts[0].message)
                for parts in zip(*(bucket.parts for bucket in buckets), strict=True)
            ),
        )
        for buckets in zip(*runs, strict=True)
    ]


def profile_of(gpu: Gpu, host: str, timed: Mapping[str, Mapping[str, Costs]]) -> Profile:
    """Put a GPU's kernels and the host's work together. timed: of all specs."""
    costs = {
        str(make(spec)) if not peers.is_peer(spec) else spec: {
            role: Costs(*map(sum, zip(work.costs(gpu), timed[spec][role], strict=True))) for role, work in roles.items()
        }
        for spec, roles in WORK.items()
    }
    return Profile(gpu.name, True, host, costs)
