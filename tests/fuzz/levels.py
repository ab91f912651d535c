"""Calls of the kernels of levels and of count sketches, with their definitions in NumPy."""

from __future__ import annotations

import numpy as np
import reference
import torch
from fuzz.call import Made, expect, maker
from fuzz.drawn import Content, Draw, Lent, keys, same
from fuzz.sparse import f32, finite, largest

from gradcomp.native import extension, kernels
from gradcomp.native.kernels.levels import LEVEL_RULES

COUNTS = (2, 3, 5, 9)
# Digits of a part of a word, and parts (math_rounding.h).
PACKINGS = {2: (32, 2), 3: (20, 2), 5: (9, 3), 9: (10, 2)}
# Rules whose levels lie between the group's ends, for any number of them.
BETWEEN = ("optimal", "range", "quantile")


def groups_of(n: int, group: int) -> list[tuple[int, int]]:
    count = kernels.groups(n, group)
    return [(i * group, n if i + 1 == count else (i + 1) * group) for i in range(count)]


def group_of(draw: Draw, n: int) -> int:
    drawn = draw.choice((32, 33, 64, 2048, n, n + 1, n - 1, 2**31 - 1, draw.randrange(n) + 1))
    return max(32, drawn, n // 30 if draw.likely(0.98) else 0)


def codes_of(words: Content, n: int, group: int, count: int) -> Content:
    """Take the numbers of the levels out of the words."""
    (digits, parts), at, found = PACKINGS[count], 0, []
    for begin, end in groups_of(n, group):
        size = -(-(end - begin) // (digits * parts))
        left, at = words[at : at + size].view(np.uint64).copy(), at + size
        codes = []
        for _ in range(parts):
            part, left = left % np.uint64(count**digits), left // np.uint64(count**digits)
            for _ in range(digits):
                codes.append(part % np.uint64(count))
                part //= np.uint64(count)
        found.append(np.concatenate(codes)[: end - begin])
    return np.concatenate(found).astype(np.int64)


def named(levels: Content, codes: Content, group: int, count: int) -> Content:
    """Return the level that each code names."""
    owner = np.minimum(np.arange(len(codes)) // group, kernels.groups(len(codes), group) - 1)
    return levels[owner * count + codes]


def ladders(draw: Draw, n: int, group: int, count: int) -> Content:
    """Draw levels for each group, mostly in order."""
    levels = draw.floats(kernels.groups(n, group) * count).copy()
    return np.sort(levels.reshape(-1, count)).reshape(-1) if draw.likely(0.9) else levels


@maker
def find_levels(draw: Draw) -> Made:
    n, count = draw.size(1), draw.choice(COUNTS)
    group, form = group_of(draw, n), draw.randrange(len(LEVEL_RULES))
    flat, groups = draw.lend(draw.floats(n)), kernels.groups(n, group)
    bounds = draw.maybe(draw.lend(draw.floats(2 * groups)), 0.3)
    levels = draw.lend(np.zeros(groups * count + draw.choice((0, 0, 2)), f32))
    cuts, flag, header = draw.garbage(groups, "float32"), draw.maybe(draw.flag()), draw.maybe(draw.garbage(2, "int32"))

    def check() -> None:
        if header is not None:
            expect(header.now.tolist() == [0, 0 if flag is None else flag.was[0]], f"the header is {header.now}")
        for i, (begin, end) in enumerate(groups_of(n, group)):
            own, x = levels.now[i * count : (i + 1) * count], flat.was[begin:end]
            if bounds is not None:
                continue
            if not finite(x).all():
                expect(not finite(own).all(), "a group that is not finite has finite levels")
            elif LEVEL_RULES[form] in BETWEEN:
                low, high = np.clip([x.min(), x.max()], -LARGEST, LARGEST)
                expect(bool((np.diff(own) >= 0).all()), f"levels {own} are not in order")
                expect(low <= own[0] and own[-1] <= high, f"levels {own} are not in [{low}, {high}]")

    arrays = {"flat": flat, "bounds": bounds, "form": form, "group": group, "count": count}
    return {**arrays, "levels": levels, "cuts": cuts, "flag": flag, "header": header}, check


LARGEST = f32(extension.LARGEST / 2)


@maker
def take_levels(draw: Draw) -> Made:
    n, count = draw.size(1), draw.choice(COUNTS)
    group = group_of(draw, n)
    residual, levels = draw.lend(draw.floats(n)), draw.lend(ladders(draw, n, group, count))
    cuts = draw.maybe(draw.lend(draw.floats(kernels.groups(n, group)))) if count == 2 else None
    key = draw.choice((0, 1, -1, 2**63 - 1, -(2**63), draw.getrandbits(62)))
    words = draw.garbage(kernels.words(n, group, count), "uint64")

    def check() -> None:
        codes = codes_of(words.now, n, group, count)
        chosen = named(levels.was, codes, group, count)
        expect(same(residual.now, residual.was - chosen), "the residual is not what the levels leave")
        if cuts is not None:
            cut = cuts.was[np.minimum(np.arange(n) // group, len(cuts) - 1)]
            expect(np.array_equal(codes, residual.was >= cut), "an entry is on the wrong side of the cut")

    arrays = {"residual": residual, "levels": levels, "cuts": cuts, "group": group, "count": count}
    return {**arrays, "key": key, "words": words}, check


def rank_of(draw: Draw, n: int, group: int, count: int) -> tuple[Lent, Lent, Lent]:
    """Lend the levels, words and header of a rank. Any words will do."""
    words = draw.words(kernels.words(n, group, count), "uint64")
    return draw.lend(ladders(draw, n, group, count)), draw.lend(words), draw.header(0)


@maker
def add_levels(draw: Draw) -> Made:
    n, count, scale = draw.size(1), draw.choice(COUNTS), draw.factor()
    group, target = group_of(draw, n), draw.lend(draw.floats(n))
    ranks = [rank_of(draw, n, group, count) for _ in range(draw.ranks(n))]

    def check() -> None:
        wanted = target.was
        for levels, words, _ in ranks:
            wanted = wanted + named(f32(scale) * levels.was, codes_of(words.was, n, group, count), group, count)
        if any(header.was[1] for *_, header in ranks):
            wanted[0] = np.nan
        expect(same(target.now, wanted), "the sums are wrong")

    levels, words, headers = ([parts[i] for parts in ranks] for i in range(3))
    arrays = {"target": target, "levels": levels, "words": words, "headers": headers}
    return {**arrays, "group": group, "count": count, "scale": scale}, check


@maker
def settle_levels(draw: Draw) -> Made:
    n, count = draw.size(1), draw.choice(COUNTS)
    group, residual, update = group_of(draw, n), draw.lend(draw.floats(n)), draw.lend(draw.floats(n))
    levels, words, _ = rank_of(draw, n, group, count)

    def check() -> None:
        wanted = residual.was
        if not np.isfinite(update.was[0]):
            wanted = wanted + named(levels.was, codes_of(words.was, n, group, count), group, count)
        expect(same(residual.now, wanted), "the residual is wrong")

    arrays = {"residual": residual, "levels": levels, "words": words, "group": group, "count": count}
    return {**arrays, "update": update}, check


# --- Sketches ---


def shape_of(draw: Draw) -> tuple[int, int, int]:
    """Draw rows, columns and a seed."""
    tiles = draw.choice((1, 2, 3, 4, 10, 63, 64, 65, 220, 2310))
    seed = draw.choice((0, 1, -1, 2**32, 2**63 - 1, draw.getrandbits(40)))
    return draw.choice((3, 5, 7, 9)), 16 * tiles, seed


@maker
def sketch(draw: Draw) -> Made:
    rows, columns, seed = shape_of(draw)
    flat, scale = draw.lend(draw.floats(draw.size())), draw.factor()
    table, compared = draw.garbage(rows * columns, "float32"), len(flat) < 3000 and np.isfinite(f32(scale)) and draw.likely(0.3)

    def check() -> None:
        wanted = reference.sketch(torch.from_numpy(flat.was), rows, columns, seed, scale)
        expect(same(table.now, wanted.numpy()), "the sketch is wrong")

    values = {"flat": flat, "rows": rows, "seed": seed, "scale": scale, "table": table}
    return values, check if compared else None


@maker
def heaviest(draw: Draw) -> Made:
    rows, columns, seed = shape_of(draw)
    table, parts = draw.lend(draw.floats(rows * columns)), draw.choice((1, 1, 2, 3, 64))
    n, blocks = draw.size(1), extension.SEARCH_BLOCK
    if draw.for_cpu and draw.likely(0.05):
        n, parts = 2**31 - 1 - draw.randrange(3000), 2**20
    part = draw.randrange(min(parts, n // blocks + 1))
    own = (n // blocks + parts - 1 - part) // parts * blocks + (n % blocks if n // blocks % parts == part else 0)
    if own == 0:
        n, part, parts, own = 1000, 0, 1, 1000
    k = draw.choice((1, own, draw.randrange(own) + 1, draw.randrange(own) % 20 + 1))
    indices, estimates = draw.garbage(k, "int32"), draw.garbage(k, "float32")
    words = extension.native.heaviest_scratch(False, n, max(k, -(-len(table) // 64)))
    compared = n < 5000 and draw.likely(0.3) and not np.isnan(table.was).any()

    def check() -> None:
        places = indices.now
        expect(bool(((places >= 0) & (places < n)).all() and (np.diff(places) > 0).all()), "places are wrong")
        expect(bool((places // blocks % parts == part).all()), "places are of another part")
        if compared:
            all_of = reference.estimates(torch.from_numpy(table.was), rows, seed, n).numpy().astype(f32)
            mine = np.flatnonzero(np.arange(n) // blocks % parts == part)
            expect(np.array_equal(places, largest(all_of[mine], mine, k)), "these are not the heaviest")
            expect(bool((keys(estimates.now) == keys(all_of[places])).all()), "estimates are wrong")

    values = {"table": table, "rows": rows, "seed": seed, "n": n, "part": part, "parts": parts}
    return {**values, "indices": indices, "estimates": estimates, "scratch": draw.garbage(words, "uint32")}, check
