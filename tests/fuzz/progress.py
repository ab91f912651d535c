"""Calls of the kernels of an exchange of updates, with their definitions in NumPy."""

from __future__ import annotations

import numpy as np
from fuzz.call import Made, expect, maker
from fuzz.drawn import Content, Draw, Lent, same
from fuzz.gradients import LINE, cast, check_moments, check_wiped, f32, finite, joined, lines, now, within

from gradcomp.native import extension

AGES = 256


def starts(draw: Draw, weights: list[Lent], n: int) -> Lent:
    """Lend starts: often the weights before a small step, or no step at all."""
    kind = draw.choice(("any", "near", "near", "same"))
    if kind == "any":
        return draw.lend(draw.floats(n))
    before = np.concatenate([np.zeros(0, f32), *(cast(each.floats + _steps(draw, kind, each), each) for each in weights)])
    return draw.lend(before.astype(f32))


def _steps(draw: Draw, kind: str, weights: Lent) -> Content:
    return draw.floats(len(weights), 0.1) * f32(1e-2 if kind == "near" else 0)


def shares(draw: Draw) -> Lent:
    """Lend shares for all ages: all or nothing of both, parts, or any numbers."""
    size = 2 * AGES + draw.choice((0, 0, 5))
    kind = draw.choice(("whole", "parts", "any"))
    if kind == "any":
        return draw.lend(draw.floats(size))
    of_all = np.frombuffer(draw.randbytes(AGES), np.uint8) % 2 if kind == "whole" else np.linspace(0, 1, AGES)
    found = np.zeros(size, f32)
    found[:AGES] = of_all
    found[AGES : 2 * AGES] = 0 if kind == "whole" else 1 - of_all
    return draw.lend(found)


@maker
def offer_progress(draw: Draw) -> Made:
    n = draw.size()
    weights = draw.pieces(n)
    start, residual = starts(draw, weights, n), draw.lend(draw.floats(n, 0.1))
    decays = draw.maybe(draw.lend(draw.floats(len(weights), 0.1) * f32(draw.choice((1, 1e-3)))))
    ages, share = draw.maybe(draw.lend(draw.words(n, "uint8")), 0.7), shares(draw)
    flag, measured = draw.garbage(1, "int32"), draw.likely(0.4)
    moments = draw.garbage(len(weights) * extension.MOMENTS, "float64") if measured else None
    words = extension.native.collect_scratch(False, n, len(weights))
    factor, of_residual = f32(draw.choice((1, 1, draw.factor()))), f32(draw.choice((1, 1, 0, 0.5)))
    arrays = {
        "weights": weights,
        "decays": decays,
        "start": start,
        "residual": residual,
        "ages": ages,
        "shares": share,
        "flag": flag,
        "moments": moments,
        "scratch": draw.garbage(words, "uint32") if measured or draw.likely(0.2) else None,
    }

    def check() -> None:
        whole, decay = start.was - joined(weights), f32(0)
        if factor != 1 and decays is not None:
            decay = np.repeat(decays.was[: len(weights)], [len(each) for each in weights])
        decayed = decay * start.was
        good = finite(whole)
        made = np.where(good, within(factor * (whole - decayed) + decayed), f32(0))
        everything = within(of_residual * residual.was + made)
        old = np.minimum(ages.was.astype(int) + 1, 255) if ages is not None else np.ones(n, int)
        offered = within(share.was[old] * everything + share.was[AGES + old] * made)
        expect(same(start.now, offered), "the offer is wrong")
        expect(same(residual.now, within(everything - offered)), "the residual is wrong")
        expect(ages is None or np.array_equal(ages.now, old), "ages are wrong")
        expect(flag.now[0] == (not good.all()), "flag is wrong")
        at = 0
        for each in weights:
            expect(same(now(each), cast(start.was[at : at + len(each)], each)), "a weight is not its start")
            at += len(each)
        if moments is not None:
            check_moments(moments.now, weights, start.now)

    return {**arrays, "factor": float(factor), "of_residual": float(of_residual)}, check


@maker
def deliver_progress(draw: Draw) -> Made:
    n = draw.size()
    update = draw.lend(draw.floats(n) * (np.frombuffer(draw.randbytes(n), np.uint8) % draw.choice((1, 2, 3)) != 1))
    first = draw.lend(draw.floats(draw.choice((1, 1, 5)), 0.2))
    marks = draw.maybe(draw.lend(np.frombuffer(draw.randbytes(lines(n)), np.uint8) % draw.choice((1, 2, 3))))
    weights, scale, wipes = draw.pieces(n), f32(draw.factor()), marks is not None and draw.likely(0.5)
    rest, residual = draw.lend(draw.floats(n, 0.1)), draw.lend(draw.floats(n, 0.1))

    def check() -> None:
        check_wiped(update, marks, wipes)
        failed, at = not finite(first.was[0]), 0
        marked = np.repeat(marks.was != 0, LINE)[:n] if marks is not None else np.ones(n, bool)
        u, left = np.where(marked, update.was, f32(0)), within(residual.was + rest.was)
        for each in weights:
            part, was = slice(at, at + len(each)), each.floats
            moved = np.where(u[part] != 0, cast(was - scale * u[part], each), was)
            if each.was.itemsize == 2 and not failed:
                of_cast = u[part] - (was - moved) / scale
                kept = finite(of_cast) & (u[part] != 0)
                left[part] = np.where(kept, within(left[part] + of_cast), left[part])
            if failed:
                moved[:1] = np.nan
            expect(same(now(each), moved), "a weight is not updated")
            at += len(each)
        expect(same(residual.now, left), "the residual is wrong")

    arrays = {"update": update, "first": first, "marks": marks, "weights": weights, "rest": rest, "residual": residual}
    return {**arrays, "scale": float(scale), "wipes": wipes}, check
