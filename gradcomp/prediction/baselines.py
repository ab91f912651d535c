"""Baselines without gradcomp, on the same timeline: DDP's own reduction, half precision, accumulation."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from gradcomp.prediction.measure import Bucket, device_wait, gradients
from gradcomp.prediction.recording_network import Message, Part

# DistributedDataParallel's buckets in bytes: the first one that backward fills, and the others.
FIRST, OTHERS = 2**20, 25 * 2**20

# How often a computation is timed, at least.
TIMES = 5

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}

NONE, STOCK = "none", "stock"
ACCUMULATED = re.compile(r"accumulate:steps=([1-9][0-9]*)")

NAMES = (STOCK, *HALVES, "accumulate:steps=4")


def is_baseline(spec: str) -> bool:
    """Decide whether a name is one of these. Refuse an accumulation with a wrong number."""
    if spec.startswith("accumulate") and not ACCUMULATED.fullmatch(spec):
        raise ValueError(f"{spec!r} is no way to exchange gradients; write for example {NAMES[-1]}")
    return spec in (NONE, STOCK, *HALVES) or ACCUMULATED.fullmatch(spec) is not None


def accumulated(spec: str) -> int:
    """Return the backward passes of a step."""
    match = ACCUMULATED.fullmatch(spec)
    return int(match[1]) if match else 1


def measure(
    spec: str,
    shapes: Mapping[str, Sequence[int]],
    device: torch.device,
    types: Mapping[str, torch.dtype] | None = None,
    seconds: float = 0.0,
) -> list[Bucket]:
    """Return the buckets of a baseline, with the times that its computations take on this device.

    types: those of gradients by layer, float32 by default. seconds: for which each computation is timed.
    """
    if spec == NONE:
        return []
    grads, wait = gradients(shapes, device, types), device_wait(device)
    timed = partial(_timed, wait, seconds)
    return [Bucket(names, _reduced({name: grads[name] for name in names}, timed, HALVES.get(spec))) for names in _plan(grads)]


def _plan(grads: Mapping[str, Tensor]) -> list[tuple[str, ...]]:
    """Group layers as DistributedDataParallel does, from the last one on. A bucket's gradients have one type."""
    closed: list[list[str]] = []
    open_: dict[torch.dtype, list[str]] = {}
    sizes: dict[torch.dtype, list[float]] = {}
    for name in reversed(list(grads)):
        form = grads[name].dtype
        open_.setdefault(form, []).append(name)
        limits = sizes.setdefault(form, [0, FIRST])
        limits[0] += grads[name].nbytes
        if limits[0] >= limits[1]:
            closed.append(open_.pop(form))
            sizes[form] = [0, OTHERS]
    return [tuple(names) for names in (*closed, *open_.values())]


def _reduced(
    grads: Mapping[str, Tensor], timed: Callable[[Callable[[], object]], float], half: torch.dtype | None
) -> tuple[Part, ...]:
    """One reduction: gradients are copied into a bucket and out of it; half precision is a cast on both ways."""
    flat = torch.cat([grad.view(-1) for grad in grads.values()])
    half = None if half is flat.dtype else half
    other = flat if half is None else flat.to(half)
    views = list(zip(flat.split([grad.numel() for grad in grads.values()]), grads.values(), strict=True))

    def into() -> None:
        for view, grad in views:
            view.copy_(grad.view(-1))
        if half is not None:
            flat.to(half)

    def out() -> None:
        if half is not None:
            flat.copy_(other)
        for view, grad in views:
            grad.view(-1).copy_(view)

    message = Message("reduce", flat.numel() * other.element_size())
    return Part(timed(into), message), Part(timed(out), None)


def _timed(wait: Callable[[], None], seconds: float, run: Callable[[], object]) -> float:
    """Return the mean of a computation's seconds: where ranks share cores, only some runs of a short one wait for a core."""
    run()
    wait()
    found = list[float]()
    while len(found) < TIMES or sum(found) < seconds:
        began = time.perf_counter()
        run()
        wait()
        found.append(time.perf_counter() - began)
    return statistics.fmean(found)
