"""Calls of the kernels between gradients and flat arrays, with their definitions in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from fuzz.call import Made, expect, maker
from fuzz.drawn import Content, Draw, Lent, same

from gradcomp.native import extension

LINE, LARGEST = extension.LINE, np.float32(extension.LARGEST)
f32 = np.float32
# Entries that spread writes past the cache.
PAST_CACHE = 1 << 22


def joined(grads: list[Lent]) -> Content:
    return np.concatenate([np.zeros(0, f32), *(each.floats for each in grads)])


def within(x: Content) -> Content:
    return np.clip(x, -LARGEST, LARGEST)


def lines(n: int) -> int:
    return -(-n // LINE)


def finite(x: Any) -> Any:
    return np.isfinite(x)


@maker
def flatten(draw: Draw) -> Made:
    n = draw.size()
    grads, flat = draw.pieces(n), draw.garbage(n, "float32")
    return {"grads": grads, "flat": flat}, lambda: expect(same(flat.now, joined(grads)), "flat is not the gradients")


@maker
def sum_squares(draw: Draw) -> Made:
    n = draw.size()
    grads = draw.pieces(n)
    squares = draw.garbage(len(grads) + draw.randrange(2), "float64")
    words = extension.native.collect_scratch(False, n, len(grads)) + draw.choice((0, 0, 1, 100))

    def check() -> None:
        with np.errstate(all="ignore"):
            wanted = np.array([np.square(each.floats.astype(np.float64)).sum() for each in grads])
        found = squares.now[: len(grads)]
        expect(bool(np.allclose(found, wanted, rtol=1e-12, equal_nan=True)), f"squares {found[:4]}, not {wanted[:4]}")

    return {"grads": grads, "squares": squares, "scratch": draw.garbage(words, "uint32")}, check


@maker
def collect(draw: Draw) -> Made:
    n = draw.size()
    grads, flat = draw.pieces(n), draw.garbage(n, "float32")
    measured = draw.likely(0.4)
    moments = draw.garbage(len(grads) * extension.MOMENTS, "float64") if measured else None
    words = extension.native.collect_scratch(False, n, len(grads))
    flag = draw.garbage(1, "int32")

    def check() -> None:
        g = joined(grads)
        good = finite(g)
        expect(same(flat.now, within(np.where(good, g, f32(0)))), "flat is wrong")
        expect(flag.now[0] == (not good.all()), "flag is wrong")
        if moments is not None:
            check_moments(moments.now, grads, flat.now)

    scratch = draw.garbage(words, "uint32") if measured or draw.likely(0.2) else None
    return {"grads": grads, "flat": flat, "flag": flag, "moments": moments, "scratch": scratch}, check


def check_moments(moments: Content, pieces: list[Lent], of: Content) -> None:
    at = 0
    for five, piece in zip(moments.reshape(-1, extension.MOMENTS), pieces, strict=True):
        x = of[at : at + len(piece)].astype(np.float64)
        at += len(piece)
        if len(x) == 0:
            expect(not five.any(), "the moments of an empty gradient are not 0")
        elif finite(x).all() and np.abs(x).max() < 1e15:
            expect(five[2] == x.min() and five[3] == x.max() and five[4] == np.count_nonzero(x), "moments are wrong")
            # Sums of float32, 16 lanes of a block's 2048 entries each: 2^-24 * 128 times the largest entry.
            expect(abs(five[0] - x.mean()) <= 1e-5 * np.abs(x).max() + 1e-44, f"mean {five[0]}, not {x.mean()}")


@maker
def spread(draw: Draw) -> Made:
    n = PAST_CACHE + draw.randrange(100) if draw.likely(2e-4) else draw.size()
    grads, flat = draw.pieces(n), draw.lend(draw.floats(n))
    first = draw.lend(draw.floats(draw.choice((1, 1, 5)), 0.2))
    marks = draw.maybe(draw.lend(np.frombuffer(draw.randbytes(lines(n)), np.uint8) % draw.choice((1, 2, 3))), 0.4)
    scale, wipes = draw.factor(), marks is not None and draw.likely(0.5)

    def check() -> None:
        check_wiped(flat, marks, wipes)
        marked = np.repeat(marks.was != 0, LINE)[:n] if marks is not None else np.ones(n, bool)
        x, at = f32(scale) * flat.was, 0
        for grad in grads:
            own, there = x[at : at + len(grad)], marked[at : at + len(grad)]
            wanted = np.where(there, cast(own, grad), f32(0))
            if not finite(first.was[0]):
                wanted[:1] = np.nan
            expect(same(now(grad), wanted), "a gradient is not the update")
            at += len(grad)

    return {"flat": flat, "first": first, "marks": marks, "grads": grads, "scale": scale, "wipes": wipes}, check


def check_wiped(flat: Lent, marks: Lent | None, wipes: bool) -> None:
    """Compare an update with what is left of it: zeros in its marked lines, if it is wiped."""
    wanted = flat.was
    if wipes and marks is not None:
        wanted = np.where(np.repeat(marks.was != 0, LINE)[: len(flat)], f32(0), flat.was)
        expect(not marks.now.any(), "marks are left")
    expect(same(flat.now, wanted) and (wipes or marks is None or marks.unchanged()), "the update is not what it should be")


def cast(x: Content, grad: Lent) -> Content:
    """Cast to the gradient's type and back."""
    if isinstance(grad.given, torch.Tensor) and grad.given.dtype == torch.bfloat16:
        return torch.from_numpy(x).bfloat16().float().numpy()
    return x.astype(grad.was.dtype).astype(f32)


def now(grad: Lent) -> Content:
    if isinstance(grad.given, torch.Tensor) and grad.given.dtype == torch.bfloat16:
        return torch.from_numpy(grad.now).view(torch.bfloat16).float().numpy()
    return grad.now.astype(f32)


@maker
def wipe(draw: Draw) -> Made:
    n = draw.size()
    flat, marks = draw.lend(draw.floats(n)), draw.lend(draw.words(lines(n), "uint8"))

    def check() -> None:
        check_wiped(flat, marks, True)

    return {"flat": flat, "marks": marks}, check


@maker
def offer_all(draw: Draw) -> Made:
    n, scale = draw.size(), draw.factor()
    residual, flag, taken = draw.lend(draw.floats(n)), draw.maybe(draw.flag()), draw.garbage(n, "float32")

    def check() -> None:
        wanted = f32(scale) * residual.was
        if n and flag is not None and flag.was[0]:
            wanted[0] = np.nan
        expect(same(taken.now, wanted), "taken is wrong")

    return {"residual": residual, "flag": flag, "taken": taken, "scale": scale}, check


@maker
def settle_all(draw: Draw) -> Made:
    n, keep = draw.size(), draw.factor()
    residual, update = draw.lend(draw.floats(n)), draw.lend(draw.floats(n))

    def check() -> None:
        wanted = residual.was
        if n and finite(update.was[0]):
            wanted = wanted * f32(keep) if keep != 0 else np.zeros(n, f32)
        expect(same(residual.now, wanted), "the residual is wrong")

    return {"residual": residual, "update": update, "keep": keep}, check
