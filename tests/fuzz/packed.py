"""Calls of the kernels that read packed entries: payloads that the packing kernel made, and such with bytes changed."""

from __future__ import annotations

from typing import Any

import numpy as np
from fuzz.call import Made, expect, maker
from fuzz.drawn import Content, Draw, Lent, same
from fuzz.gradients import lines
from fuzz.sparse import BLOCK, added, f32, share_of

from gradcomp.native import extension, kernels


def payload(draw: Draw, n: int, space: int) -> tuple[Lent, Lent, Lent]:
    """Lend the header, blocks and entries of a payload; every third one with bytes changed, or with any bytes."""
    count = draw.choice((space, space, draw.randrange(space + 1)))
    parts = np.zeros(-(-n // BLOCK), np.uint32), np.zeros(kernels.packed_words(n, space), np.uint32)
    header = np.array([count, 0], np.int32)
    values, indices = np.zeros(space, np.float32), np.zeros(space, np.int32)
    values[:count], indices[:count] = draw.floats(count, 0.1), draw.places(n, count)
    extension.native.pack_sparse(None, values, indices, header, n, *parts)
    luck = draw.random()
    if luck < 0.1:
        parts = tuple(draw.words(len(part), "uint32").copy() for part in parts)
    elif luck < 0.35:
        for part in parts:
            for _ in range(draw.randrange(3)):
                part.view(np.uint8)[draw.randrange(4 * len(part))] = draw.choice((0, 255, draw.randrange(256)))
    indices[:] = -1
    extension.native.unpack_sparse(values, indices, np.array([space, 0], np.int32), n, *parts)
    named = indices[indices >= 0]
    if len(np.unique(named)) < len(named) and not draw.for_cpu:
        return payload(draw, n, space)
    return draw.header(count), draw.lend(parts[0]), draw.lend(parts[1])


def space_of(draw: Draw, n: int) -> int:
    return min(draw.choice((1, n, draw.randrange(n) + 1, draw.randrange(20) + 1)), n, 5000)


def unpacked(header: Lent, blocks: Lent, entries: Lent, n: int, space: int) -> tuple[Content, Content, bool]:
    """Unpack by the kernel, which is fuzzed, too. Return values, places, and whether they are sound."""
    values, places = np.zeros(space, np.float32), np.zeros(space, np.int32)
    told = np.array([header.was[0], 0], np.int32)
    extension.native.unpack_sparse(values, places, told, n, blocks.was, entries.was)
    count = max(int(header.was[0]), 0)
    return values[:count], places[:count], told[1] == 0


@maker
def unpack_sparse(draw: Draw) -> Made:
    n = draw.size(1)
    space = space_of(draw, n)
    header, blocks, entries = payload(draw, n, space)
    values, indices = draw.garbage(space, "float32"), draw.garbage(space, "int32")

    def check() -> None:
        count = int(header.was[0])
        expect(header.now[0] == count and (count >= 0 or header.now[1] != 0), "the header is wrong")
        if count < 0 or header.now[1] != 0:
            return
        places = indices.now[:count]
        inside = (places >= 0) & (places < n)
        # Two places with the same high part may come in any order: a sender that packs sound places keeps theirs.
        expect(bool(inside.all() and (np.diff(places >> 16) >= 0).all()), f"a payload that is not flagged has {places[:4]}")
        expect(bool(np.isfinite(values.now[:count]).all()), "a value is no power of two")

    arrays: dict[str, Any] = {"values": values, "indices": indices, "header": header, "n": n}
    return {**arrays, "blocks": blocks, "entries": entries}, check


@maker
def add_packed(draw: Draw) -> Made:
    n, scale = draw.size(1), draw.factor()
    space = space_of(draw, n)
    target, marks = draw.lend(draw.floats(n)), draw.maybe(draw.lend(np.zeros(lines(n), np.uint8)))
    sent = [payload(draw, n, space) for _ in range(draw.ranks(n))]

    def check() -> None:
        wanted, well_formed = target.was, True
        for header, blocks, entries in sent:
            values, places, sound = unpacked(header, blocks, entries, n, space)
            flagged = bool(header.was[1] != 0)
            well_formed &= sound and not flagged
            if sound and not flagged:
                wanted, _ = added(wanted, values, places, len(places), f32(scale))
        if well_formed:
            expect(same(target.now, wanted), "the sums are wrong")
            written = np.flatnonzero(wanted.view(np.int32) != target.was.view(np.int32))
            expect(marks is None or bool(marks.now[written // extension.LINE].all()), "a line that was written has no mark")
        else:
            expect(bool(np.isnan(target.now[0])), "target[0] is a number, but a payload is malformed or flagged")

    headers, blocks, entries = ([parts[i] for parts in sent] for i in range(3))
    arrays = {"target": target, "marks": marks, "blocks": blocks, "entries": entries, "headers": headers}
    return {**arrays, "capacity": space, "scale": scale}, check


@maker
def settle_packed(draw: Draw) -> Made:
    n, keep = draw.size(1), draw.factor()
    space = space_of(draw, n)
    residual, update = draw.lend(draw.floats(n)), draw.lend(draw.floats(n))
    header, blocks, entries = payload(draw, n, space)

    def check() -> None:
        share = share_of(update, keep)
        values, places, sound = unpacked(header, blocks, entries, n, space)
        if sound or share == 0:
            count = len(places) if share != 0 else 0
            expect(same(residual.now, added(residual.was, values, places, count, share)[0]), "the residual is wrong")

    arrays = {"residual": residual, "blocks": blocks, "entries": entries, "header": header, "update": update}
    return {**arrays, "capacity": space, "keep": keep}, check
