"""What users have without gradcomp, on the same timeline: DDP's own reduction, half precision, PowerSGD, accumulation."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from gradcomp.prediction.mirror import Message
from gradcomp.prediction.trial import Bucket, Part, device_wait, gradients

# DistributedDataParallel's buckets in bytes: the first one that backward fills, and the others.
FIRST, OTHERS = 2**20, 25 * 2**20

# How often a computation is timed, at least.
TIMES = 5

# PowerSGD compresses a matrix only if this makes it smaller by more than this (min_compression_rate of torch's PowerSGDState).
LEAST_RATE = 2
# It orthogonalises so few columns one after the other, and more by a QR decomposition.
GRAM_SCHMIDT = 2

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}

NONE, STOCK = "none", "stock"
ACCUMULATED = re.compile(r"(?:accumulate:steps=)([1-9][0-9]*)")
POWERSGD = re.compile(r"(?:powersgd:rank=)([1-9][0-9]*)")

NAMES = (STOCK, *HALVES, "powersgd:rank=1", "powersgd:rank=4", "accumulate:steps=4")


def is_peer(spec: str) -> bool:
    """Decide whether a name is one of these ways."""
    return spec in (NONE, STOCK, *HALVES) or any(form.fullmatch(spec) for form in (ACCUMULATED, POWERSGD))


def check(spec: str) -> None:
    """Refuse one of these ways with a wrong number."""
    like = next((name for name in NAMES if ":" in name and name.partition(":")[0] == spec.partition(":")[0]), None)
    if like is not None and not is_peer(spec):
        raise ValueError(f"{spec!r} is no way to exchange gradients; write for example {like}")


def accumulated(spec: str) -> int:
    """Return the backward passes of a step."""
    match = ACCUMULATED.fullmatch(spec)
    return int(match[1]) if match else 1


def buckets_of(
    spec: str,
    shapes: Mapping[str, Sequence[int]],
    device: torch.device,
    types: Mapping[str, torch.dtype] | None = None,
    part: float = 1.0,
    seconds: float = 0.0,
) -> list[Bucket]:
    """Return the buckets of a way, with the times that its computations take on this device.

    types: those of gradients by layer, float32 by default. part: of a model's layers, and of its buckets, that the shapes are.
    seconds: for which each computation is timed.
    """
    if spec == NONE:
        return []
    grads, wait = gradients(shapes, device, types), device_wait(device)
    timed, parts = partial(_timed, wait, seconds), _parts_of(spec)
    return [Bucket(names, parts({name: grads[name] for name in names}, timed)) for names in _plan(grads, part)]


def _plan(grads: Mapping[str, Tensor], part: float) -> list[tuple[str, ...]]:
    """Group layers as DistributedDataParallel does, from the last one on. A bucket's gradients have one type."""
    closed: list[list[str]] = []
    open_: dict[torch.dtype, list[str]] = {}
    sizes: dict[torch.dtype, list[float]] = {}
    for name in reversed(list(grads)):
        form = grads[name].dtype
        open_.setdefault(form, []).append(name)
        limits = sizes.setdefault(form, [0, part * FIRST])
        limits[0] += grads[name].nbytes
        if limits[0] >= limits[1]:
            closed.append(open_.pop(form))
            sizes[form] = [0, part * OTHERS]
    return [tuple(names) for names in (*closed, *open_.values())]


_Timed = Callable[[Callable[[], object]], float]
_Parts = Callable[[Mapping[str, Tensor], _Timed], tuple[Part, ...]]


def _parts_of(spec: str) -> _Parts:
    if (match := POWERSGD.fullmatch(spec)) is not None:
        rank = int(match[1])
        return lambda grads, timed: _powersgd(grads, timed, rank)
    half = HALVES.get(spec)
    return lambda grads, timed: _reduced(grads, timed, half)


def _reduced(grads: Mapping[str, Tensor], timed: _Timed, half: torch.dtype | None) -> tuple[Part, ...]:
    """One reduction: gradients are copied into a bucket and out of it; half precision is a cast on both ways."""
    flat = torch.cat([grad.view(-1) for grad in grads.values()])
    half = None if half is flat.dtype else half
    other = flat if half is None else flat.to(half)
    views = list(zip(_split(flat, grads), grads.values(), strict=True))

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


def _powersgd(grads: Mapping[str, Tensor], timed: _Timed, most: int) -> tuple[Part, ...]:
    """Reduce all that is not compressed, then the left factors, orthogonalise them, reduce the right factors.

    As in torch's powerSGD_hook, with its defaults: error feedback, and the last step's right factors, orthogonalised, to begin
    with. most: the rank, but for matrices with fewer rows or columns.
    """
    flat = torch.cat([grad.view(-1) for grad in grads.values()])
    views = [view.view(grad.shape) for view, grad in zip(_split(flat, grads), grads.values(), strict=True)]
    matrices = [view.view(view.shape[0], -1) for view in views if view.dim() > 1 and view.numel()]
    ranks = [min(most, *matrix.shape) for matrix in matrices]
    low = [
        (each, rank) for each, rank in zip(matrices, ranks, strict=True) if LEAST_RATE * rank * sum(each.shape) < each.numel()
    ]
    left, right = ([flat.new_empty(matrix.shape[side], rank) for matrix, rank in low] for side in (0, 1))
    for factor in right:
        factor.normal_()
    rest = flat.numel() - sum(matrix.numel() for matrix, _ in low)
    kept = [torch.zeros_like(flat), flat]  # the error of the last step, and what this one is to send

    def begin() -> None:
        for view, grad in zip(views, grads.values(), strict=True):
            view.copy_(grad)
        kept[1] = flat.add_(kept[0]).clone()
        for (matrix, _), p, q in zip(low, left, right, strict=True):
            torch.mm(matrix, _orthogonalise(q), out=p)

    def middle() -> None:
        for (matrix, _), p, q in zip(low, left, right, strict=True):
            torch.mm(matrix.t(), _orthogonalise(p), out=q)

    def end() -> None:
        for (matrix, _), p, q in zip(low, left, right, strict=True):
            torch.mm(p, q.t(), out=matrix)
        kept[0] = kept[1] - flat
        for view, grad in zip(views, grads.values(), strict=True):
            grad.copy_(view)

    width = flat.element_size()
    whole = [Part(0.0, Message("reduce", width * rest))] if rest else []
    if not low:
        return whole[0]._replace(seconds=timed(begin)), Part(timed(end), None)
    first, second = (Message("reduce", width * sum(factor.numel() for factor in side)) for side in (left, right))
    encoding = timed(begin)
    # The left factors are there before the rest is sent, and follow its answer.
    before = [whole[0]._replace(seconds=encoding), Part(0.0, first)] if whole else [Part(encoding, first)]
    return *before, Part(timed(middle), second), Part(timed(end), None)


def _split(flat: Tensor, grads: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    parts: tuple[Tensor, ...] = flat.split([grad.numel() for grad in grads.values()])
    return parts


def _orthogonalise(factor: Tensor) -> Tensor:
    """Make the columns orthonormal, in place: one after the other where they are few, as torch's hook does."""
    if factor.shape[1] > GRAM_SCHMIDT and factor.dtype not in HALVES.values():
        torch.linalg.qr(factor, out=(factor, factor.new_empty(factor.shape[1], factor.shape[1])))
        return factor
    for i, column in enumerate(factor.split(1, dim=1)):
        column /= column.norm()
        others = factor[:, i + 1 :]
        others -= (column * others).sum(dim=0, keepdim=True) * column
    return factor


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
