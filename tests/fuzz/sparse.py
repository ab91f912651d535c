"""Calls of the kernels of sparse entries, with their definitions in NumPy. Payloads may hold any bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import reference
import torch
from fuzz.call import Made, expect, maker
from fuzz.drawn import Content, Draw, Lent, keys, same
from fuzz.gradients import finite, lines

from gradcomp.native import extension, kernels

f32 = np.float32
BLOCK = kernels.BLOCK


def selection(draw: Draw) -> dict[str, Any]:
    """Make the common arguments of both takes."""
    n = draw.size(1)
    residual = draw.lend(draw.floats(n))
    ages = draw.maybe(draw.lend(draw.words(n, "uint8")))
    return {"residual": residual, "ages": ages, "flag": draw.maybe(draw.flag())}


def check_taken(values: dict[str, Any], wanted: Content | None, passed: int) -> None:
    """Hold a take to these places; to any if they are not known."""
    residual, header = values["residual"], values["header"].now
    count = min(int(header[0]), len(values["values"]))
    places = values["indices"].now[:count]
    if wanted is not None:
        expect(header[0] == passed and np.array_equal(places, wanted), f"took {places[:4]}, not {wanted[:4]}")
    expect(header[1] == (0 if values["flag"] is None else values["flag"].was[0]), "the header's flag is wrong")
    expect(bool(((places >= 0) & (places < len(residual))).all() and (np.diff(places) > 0).all()), "places are wrong")
    expect(same(values["values"].now[:count], residual.was[places]), "values are not the residual's")
    left = residual.was.copy()
    left[places] = 0
    expect(same(residual.now, left), "the residual is wrong")
    if values["ages"] is not None:
        ages = values["ages"].was.copy()
        ages[places] = 0
        expect(same(values["ages"].now, ages), "ages are wrong")


def largest(entries: Content, places: Content, k: int) -> Content:
    """Return the places of the k largest of these entries, in order; ties to the lower place."""
    return np.sort(places[np.argsort(-keys(entries), kind="stable")[:k]])


@maker
def take_topk(draw: Draw) -> Made:
    values = selection(draw)
    n = len(values["residual"])
    k = draw.choice((1, n, draw.randrange(n) + 1, draw.randrange(n) % 20 + 1))
    words = extension.native.take_topk_scratch(False, n, k) + draw.choice((0, 0, 1, 1000))
    spare = draw.choice((0, 0, 3))
    values |= {"k": k, "values": draw.garbage(k + spare, "float32"), "indices": draw.garbage(k + spare, "int32")}
    values |= {"header": draw.garbage(2, "int32"), "scratch": draw.garbage(words, "uint32")}

    def check() -> None:
        x = values["residual"].was
        check_taken(values, largest(x, np.arange(n), k), k)

    return values, check


@maker
def take_above(draw: Draw) -> Made:
    values = selection(draw)
    n, x = len(values["residual"]), values["residual"].was
    ends, legal = layout(draw, n)
    space = draw.choice((1, n, n + 5, draw.randrange(n) + 1, draw.randrange(n) % 20 + 1))
    some = draw.choice((0.0, float(np.abs(x[draw.randrange(n)])), 1.0, 1e-40, float("inf"), float("nan"), -1.0))
    thresholds = draw.floats(len(ends)) if draw.likely(0.5) else np.full(len(ends), some, f32)
    words = extension.native.take_above_scratch(False, n, space)
    values |= {"ends": ends, "thresholds": draw.lend(thresholds), "values": draw.garbage(space, "float32")}
    values |= {"indices": draw.garbage(space, "int32"), "header": draw.garbage(2, "int32")}
    values |= {"scratch": draw.garbage(words, "uint32")}

    def check() -> None:
        layer = np.minimum(np.searchsorted(ends.was, np.arange(n), side="right"), len(ends) - 1)
        passing = np.flatnonzero(keys(x) > keys(thresholds)[layer])
        wanted = largest(x[passing], passing, space)
        check_taken(values, wanted if legal else None, len(passing))

    return values, check


def layout(draw: Draw, n: int) -> tuple[Lent, bool]:
    """Lend the ends of layers that cover n entries, some of them empty; or ends that no layout has."""
    count = draw.choice((1, 1, 2, 5, 40))
    ends = np.array([*sorted(draw.randrange(n + 1) for _ in range(count - 1)), n])
    legal = draw.likely(0.8)
    if not legal:
        for _ in range(draw.randrange(1, 4)):
            ends[draw.randrange(count)] = draw.choice((-100, -(2**31), 2**31 - 1, 0, n, n - 1, n + 64, draw.randrange(n + 1)))
        if draw.likely(0.3):
            ends = ends[::-1]
    return draw.lend(ends, "int32"), legal


@maker
def set_thresholds(draw: Draw) -> Made:
    ends, legal = layout(draw, draw.size())
    moments = draw.floats(len(ends) * extension.MOMENTS + draw.choice((0, 0, 3))).astype(np.float64)
    if draw.likely(0.5):
        moments = np.abs(moments)
    thresholds, lam = draw.garbage(len(ends), "float32"), draw.lend(draw.floats(1))
    pooled = draw.likely(0.5)

    def check() -> None:
        found = thresholds.now
        expect(not pooled or same(found, np.full(len(found), found[-1])), "pooled thresholds differ")
        if not legal or pooled or not finite(moments).all():
            return
        for i, (begin, end) in enumerate(zip([0, *ends.was[:-1].tolist()], ends.was.tolist(), strict=True)):
            mean, squares, low, high, nonzero = moments[5 * i : 5 * i + 5]
            if squares < 1e30 and nonzero in (0, end - begin) and end > begin and squares > 0:
                wanted, largest = f32(float(lam.was[0]) * np.sqrt(squares / (end - begin))), f32(max(-low, high))
                if largest > 0 and not wanted < largest:
                    wanted = np.nextafter(largest, f32(0))
                expect(bool(np.isclose(found[i], wanted, rtol=1e-6, equal_nan=True)), f"{found[i]}, not {wanted}; {mean}")

    values = {"moments": draw.lend(moments), "ends": ends, "lam": lam, "pooled": pooled, "thresholds": thresholds}
    return values, check


@maker
def steer(draw: Draw) -> Made:
    target = draw.choice((1, 2, 1000, 2**31, 2**62, 2**63 - 1))
    header, lam = draw.header(draw.randrange(2000)), draw.lend(draw.floats(2))

    def check() -> None:
        if finite(lam.was).all():
            expect(2**-10 <= lam.now[0] <= 2**10 and 0.0099 < abs(lam.now[1]) < 0.101, f"lam is {lam.now}")
            expect((lam.now[1] > 0) == (header.was[0] >= target), "the side is wrong")

    return {"lam": lam, "header": header, "target": target}, check


def entries(draw: Draw, n: int) -> tuple[Lent, Lent, Lent]:
    """Lend the values, indices and header of a payload; seldom with places that no payload has."""
    space = min(draw.choice((0, 1, n, draw.randrange(n + 1), draw.randrange(20))), n)
    places = draw.places(n, space)
    if draw.likely(0.2):
        wild = np.where(draw.words(space, "uint8") % 4 == 0, draw.words(space, "int32"), places)
        if draw.for_cpu or len(np.unique(wild)) == space:
            places = wild if draw.for_cpu else np.sort(wild)
    count = draw.choice((space, space, draw.randrange(space + 1)))
    return draw.lend(draw.floats(space)), draw.lend(places, "int32"), draw.header(count)


def added(target: Content, x: Content, places: Content, count: int, scale: np.float32) -> tuple[Content, bool]:
    """Add entries one after the other. Return the sums, and whether all places were inside."""
    target, x, places = target.copy(), scale * x[:count], places[:count].astype(np.int64)
    if len(places) == 0 or ((np.diff(places) > 0).all() and places[0] >= 0 and places[-1] < len(target)):
        target[places] += x
        return target, True
    inside = True
    for value, place in zip(x, places.tolist(), strict=True):
        if 0 <= place < len(target):
            target[place] += value
        else:
            inside = False
    return target, inside


@maker
def add_sparse(draw: Draw) -> Made:
    n, scale = draw.size(1), draw.factor()
    target, marks = draw.lend(draw.floats(n)), draw.maybe(draw.lend(np.zeros(lines(n), np.uint8)))
    values, indices, header = entries(draw, n)

    def check() -> None:
        count, flag = header.was.tolist()
        bad = flag != 0 or count < 0
        wanted, inside = added(target.was, values.was, indices.was, 0 if bad else count, f32(scale))
        if bad or not inside:
            wanted[0] = np.nan
        expect(same(target.now, wanted), "the sums are wrong")
        if marks is not None:
            changed = wanted.view(np.int32) != target.was.view(np.int32)
            expect(bool(marks.now[np.flatnonzero(changed) // extension.LINE].all()), "a line that was written has no mark")

    arrays = {"target": target, "marks": marks, "values": values, "indices": indices, "header": header}
    return {**arrays, "scale": scale}, check


def share_of(update: Lent, keep: float) -> np.float32:
    return f32(keep) if finite(update.was[0]) else f32(1)


@maker
def settle_sparse(draw: Draw) -> Made:
    n, keep = draw.size(1), draw.factor()
    residual, update = draw.lend(draw.floats(n)), draw.lend(draw.floats(n))
    values, indices, header = entries(draw, n)

    def check() -> None:
        share = share_of(update, keep)
        count = max(int(header.was[0]), 0) if share != 0 else 0
        expect(same(residual.now, added(residual.was, values.was, indices.was, count, share)[0]), "the residual is wrong")

    arrays = {"residual": residual, "values": values, "indices": indices, "header": header, "update": update}
    return {**arrays, "keep": keep}, check


@maker
def pack_sparse(draw: Draw) -> Made:
    n = draw.size(1)
    values, indices, header = entries(draw, n)
    while len(values) == 0:
        values, indices, header = entries(draw, n)
    space = len(values)
    residual = draw.maybe(draw.lend(draw.floats(n, 0)))
    blocks = draw.garbage(-(-n // BLOCK), "uint32")
    words = draw.garbage(kernels.packed_words(n, space), "uint32")
    sound = bool((np.diff(indices.was.astype(np.int64)) > 0).all() and indices.was[0] >= 0 and indices.was[-1] < n)
    sound &= bool(0 < header.was[0] <= space <= 40 and finite(values.was).all())

    def check() -> None:
        if not sound:
            return
        count = int(header.was[0])
        parts = (torch.from_numpy(each.was[:count]) for each in (values, indices))
        x, places = (torch.cat([part, part[:0].new_zeros(0)]) for part in parts)
        if count == space:
            wanted_blocks, wanted, said = reference.packed(x, places, n)
            expect(same(blocks.now.astype(np.int64) & 0xFFFFFFFF, wanted_blocks.numpy()), "blocks are wrong")
            expect(same(words.now.astype(np.int64) & 0xFFFFFFFF, wanted.numpy()), "entries are wrong")
            if residual is not None:
                sums, _ = added(residual.was, values.was - said.numpy().astype(f32), indices.was, count, f32(1))
                expect(same(residual.now, sums), "the residual is wrong")

    arrays = {"residual": residual, "values": values, "indices": indices, "header": header, "n": n}
    return {**arrays, "blocks": blocks, "entries": words}, check
