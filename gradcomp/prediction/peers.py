"""What users have without gradcomp, on the same timeline: DDP's own reduction, half precision, PowerSGD, accumulation."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from gradcomp.prediction.mirror import Message
from gradcomp.prediction.trial import Bucket, Part, device_wait, gradients

# DistributedDataParallel's buckets in bytes: the first one that backward fills, and the others.
FIRST, OTHERS = 2**20, 25 * 2**20

# How often a computation is timed.
TIMES = 5

# PowerSGD compresses a matrix only if this makes it smaller by more than this (min_compression_rate of torch's PowerSGDState).
LEAST_RATE = 2

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}

NONE, STOCK = "none", "stock"
ACCUMULATED = re.compile(r"(?:accumulate:steps=)([1-9][0-9]*)")
POWERSGD = re.compile(r"(?:powersgd:rank=)([1-9][0-9]*)")

NAMES = (STOCK, *HALVES, "powersgd:rank=1", "powersgd:rank=4", "accumulate:steps=4")


def is_peer(spec: str) -> bool:
    """Decide whether a name is one of these ways."""
    return spec in (NONE, STOCK, *HALVES) or any(form.fullmatch(spec) for form in (ACCUMULATED, POWERSGD))


def accumulated(spec: str) -> int:
    """Return the backward passes of a step."""
    match = ACCUMULATED.fullmatch(spec)
    return int(match[1]) if match else 1


def buckets_of(
    spec: str,
    shapes: Mapping[str, Sequence[int]],
    device: torch.device,
    types: Mapping[str, torch.dtype] | None = None,
) -> list[Bucket]:
    """Return the buckets of a way, with the times that its computations take on this device.

    types: those of gradients by layer, float32 by default.
    """
    if spec == NONE:
        return []
    grads, wait = gradients(shapes, device, types), device_wait(device)
    parts = _parts_of(spec)
    return [Bucket(names, parts({name: grads[name] for name in names}, wait)) for names in _plan(grads)]


def _plan(grads: Mapping[str, Tensor]) -> list[tuple[str, ...]]:
    """Group layers as DistributedDataParallel does, from the last one on. A bucket's gradients have one type."""
    closed: list[list[str]] = []
    open_: dict[torch.dtype, list[str]] = {}
    sizes: dict[torch.dtype, list[int]] = {}
    for name in reversed(list(grads)):
        form = grads[name].dtype
        open_.setdefault(form, []).append(name)
        limits = sizes.setdefault(form, [0, FIRST])
        limits[0] += grads[name].nbytes
        if limits[0] >= limits[1]:
            closed.append(open_.pop(form))
            sizes[form] = [0, OTHERS]
    return [tuple(names) for names in (*closed, *open_.values())]


_Parts = Callable[[Mapping[str, Tensor], Callable[[], None]], tuple[Part, ...]]


def _parts_of(spec: str) -> _Parts:
    if (match := POWERSGD.fullmatch(spec)) is not None:
        rank = int(match[1])
        return lambda grads, wait: _powersgd(grads, wait, rank)
    half = HALVES.get(spec)
    return lambda grads, wait: _reduced(grads, wait, half)


def _reduced(grads: Mapping[str, Tensor], wait: Callable[[], None], half: torch.dtype | None) -> tuple[Part, ...]:
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
    return Part(_timed(into, wait), message), Part(_timed(out, wait), None)


def _powersgd(grads: Mapping[str, Tensor], wait: Callable[[], None], most: int) -> tuple[Part, ...]:
    """Reduce all that is not compressed, then the left factors, orthogonalise them, reduce the right factors.

    As in torch's powerSGD_hook, with its defaults. most: the rank, but for matrices with fewer rows or columns.
    """
    form = next(iter(grads.values())).dtype
    matrices = [grad.view(grad.shape[0], -1) for grad in grads.values() if grad.dim() > 1 and grad.numel()]
    low = [(each, rank) for each in matrices if LEAST_RATE * (rank := min(most, *each.shape)) * sum(each.shape) < each.numel()]
    each_sent = [rank * matrix.shape[0] for matrix, rank in low], [rank * matrix.shape[1] for matrix, rank in low]
    width = form.itemsize
    rest = sum(grad.numel() for grad in grads.values()) - sum(matrix.numel() for matrix, _ in low)
    whole = [Part(0.0, Message("reduce", width * rest))] if rest else []
    if not low:
        return *whole, Part(0.0, None)
    right = [torch.randn(matrix.shape[1], rank, device=matrix.device).to(form) for matrix, rank in low]
    errors = [torch.zeros_like(matrix) for matrix, _ in low]
    left = [matrix @ q for (matrix, _), q in zip(low, right, strict=True)]

    def begin() -> None:
        for (matrix, _), error, q in zip(low, errors, right, strict=True):
            torch.add(matrix, error) @ q

    def middle() -> None:
        for (matrix, _), p in zip(low, left, strict=True):
            matrix.t() @ torch.linalg.qr(p.float()).Q.to(form)

    def end() -> None:
        for (matrix, _), p, q in zip(low, left, right, strict=True):
            torch.sub(matrix, p @ q.t())

    first, second = (Message("reduce", width * sum(sizes)) for sizes in each_sent)
    encoding = _timed(begin, wait)
    # The left factors are there before the rest is sent, and follow its answer.
    before = [whole[0]._replace(seconds=encoding), Part(0.0, first)] if whole else [Part(encoding, first)]
    return *before, Part(_timed(middle, wait), second), Part(_timed(end, wait), None)


def _timed(run: Callable[[], None], wait: Callable[[], None]) -> float:
    run()
    found = []
    for _ in range(TIMES):
        wait()
        began = time.perf_counter()
        run()
        wait()
        found.append(time.perf_counter() - began)
    return statistics.median(found)
