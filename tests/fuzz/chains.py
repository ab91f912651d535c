"""Calls of the chains. Their definition is that of their kernels of the same twin, called one after the other on copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from fuzz import gradients, levels, packed, sparse
from fuzz.call import Made, expect, maker
from fuzz.drawn import Content, Draw, Lent, same
from fuzz.sparse import BLOCK, f32

from gradcomp.native import extension, kernels

TAKE = ("residual", "ages", "flag")


def padded(content: Content) -> bytes:
    """Pad an array of a payload to a multiple of 8 bytes."""
    return content.tobytes() + bytes(-content.nbytes % 8)


def payload(draw: Draw, parts: Sequence[Content]) -> Lent:
    """Lend the bytes of a payload with these arrays, at an address that a payload may have."""
    lent = Lent(np.frombuffer(b"".join(map(padded, parts)), np.int64), draw)
    lent.now, lent.was, lent.floats = (each.view(np.uint8) for each in (lent.now, lent.was, lent.was))
    lent.given = lent.given.view(torch.uint8 if isinstance(lent.given, torch.Tensor) else np.uint8)
    return lent


def arrays_of(content: Content, forms: Sequence[tuple[str, int]]) -> list[Content]:
    """Take a payload's bytes apart. forms: type and length of each array."""
    found, at = [], 0
    for dtype, length in forms:
        end = at + length * np.dtype(dtype).itemsize
        found.append(content[at:end].view(dtype))
        at = -(-end // 8) * 8
    return found


def packed_form(n: int, space: int) -> list[tuple[str, int]]:
    return [("int32", 2), ("uint32", -(-n // BLOCK)), ("uint32", kernels.packed_words(n, space))]


def levels_form(n: int, group: int, count: int) -> list[tuple[str, int]]:
    return [("int32", 2), ("float32", kernels.groups(n, group) * count), ("uint64", kernels.words(n, group, count))]


def empty(draw: Draw, forms: Sequence[tuple[str, int]]) -> Lent:
    return payload(draw, [np.frombuffer(draw.randbytes(length * np.dtype(dtype).itemsize), dtype) for dtype, length in forms])


def counters(draw: Draw) -> Lent:
    """Lend the zeros in which blocks count. They are zeros again afterwards."""
    return draw.lend(np.zeros(extension.COUNTERS + draw.choice((0, 0, 3)), np.uint32))


def copy(values: dict[str, Any]) -> dict[str, Any]:
    """Copy the arrays as they were before the call."""
    return {name: value.was.copy() if isinstance(value, Lent) else value for name, value in values.items()}


def check_written(values: dict[str, Any], copies: dict[str, Any], *names: str) -> None:
    for name in names:
        expect(values[name] is None or same(values[name].now, copies[name]), f"{name} is not what the kernels leave")


def check_packed(values: dict[str, Any], copies: dict[str, Any], space: int, taken: Sequence[Content]) -> None:
    """Pack the taken entries, and compare the payloads."""
    n = len(values["residual"])
    header, *parts = arrays_of(copies["payload"], packed_form(n, space))
    extension.native.pack_sparse(copies["residual"], *taken, header, n, *parts)
    check_written(values, copies, "payload", "residual", "ages", "counters")


@maker
def take_topk_and_pack(draw: Draw) -> Made:
    values = sparse.selection(draw)
    n = len(values["residual"])
    k = packed.space_of(draw, n)
    words = extension.native.take_topk_and_pack_scratch(False, n, k) + draw.choice((0, 0, 1, 1000))
    values |= {"k": k, "payload": empty(draw, packed_form(n, k)), "scratch": draw.garbage(words, "uint32")}
    values |= {"counters": counters(draw)}

    def check() -> None:
        copies, taken = copy(values), (np.zeros(k, f32), np.zeros(k, np.int32))
        header = copies["payload"][:8].view(np.int32)
        scratch = np.zeros(extension.native.take_topk_scratch(False, n, k), np.uint32)
        extension.native.take_topk(*(copies[name] for name in TAKE), k, *taken, header, scratch)
        check_packed(values, copies, k, taken)

    return values, check


@maker
def take_above_and_pack(draw: Draw) -> Made:
    values = sparse.selection(draw)
    n = len(values["residual"])
    ends, legal = sparse.layout(draw, n)
    space, moments = packed.space_of(draw, n), draw.floats(len(ends) * extension.MOMENTS).astype(np.float64)
    words = extension.native.take_above_and_pack_scratch(False, n, space)
    pooled = draw.likely(0.5)
    values |= {"moments": draw.lend(np.abs(moments)), "ends": ends, "lam": draw.lend(draw.floats(2)), "pooled": pooled}
    values |= {"target": draw.choice((0, 1, 1000, 2**63 - 1)), "thresholds": draw.garbage(len(ends), "float32")}
    values |= {"capacity": space, "payload": empty(draw, packed_form(n, space)), "scratch": draw.garbage(words, "uint32")}
    values |= {"counters": counters(draw)}

    def check() -> None:
        copies, taken = copy(values), (np.zeros(space, f32), np.zeros(space, np.int32))
        header, own = copies["payload"][:8].view(np.int32), [copies[name] for name in ("ends", "lam", "thresholds")]
        extension.native.set_thresholds(copies["moments"], *own[:2], pooled, own[2])
        scratch = np.zeros(extension.native.take_above_scratch(False, n, space), np.uint32)
        extension.native.take_above(*(copies[name] for name in TAKE), own[0], own[2], *taken, header, scratch)
        if values["target"]:
            extension.native.steer(own[1], header, values["target"])
        check_packed(values, copies, space, taken)
        check_written(values, copies, "lam", "thresholds")

    return values, check if legal else None


@maker
def add_and_settle_packed(draw: Draw) -> Made:
    n, scale, keep = draw.size(1), draw.factor(), draw.factor()
    space = packed.space_of(draw, n)
    sent = [payload(draw, [part.was for part in packed.payload(draw, n, space)]) for _ in range(draw.ranks(n) + 1)]
    values = {"target": draw.lend(draw.floats(n)), "marks": draw.maybe(draw.lend(np.zeros(gradients.lines(n), np.uint8)))}
    values |= {
        "residual": draw.lend(draw.floats(n)),
        "counters": counters(draw),
        "first": draw.maybe(draw.garbage(1, "float32")),
    }

    def check() -> None:
        copies, (own, *others) = copy(values), (arrays_of(each.was, packed_form(n, space)) for each in sent)
        headers, blocks, entries = ([parts[i] for parts in others] for i in range(3))
        extension.native.add_packed(copies["target"], copies["marks"], blocks, entries, headers, space, scale)
        extension.native.settle_packed(copies["residual"], *own[1:], own[0], copies["target"], space, keep)
        check_written(values, copies, "target", "marks", "residual", "counters")
        expect(values["first"] is None or same(values["first"].now, copies["target"][:1]), "first is not the target's")

    return {**values, "payloads": sent[1:], "capacity": space, "scale": scale, "own": sent[0], "keep": keep}, check


@maker
def find_and_take_levels(draw: Draw) -> Made:
    values, _ = levels.find_levels(draw)
    n, group, count = len(values["flat"]), values["group"], values["count"]
    groups, drawn = kernels.groups(n, group), count != 2 or draw.likely(0.5)
    values |= {"residual": draw.lend(values["flat"].was), "flag": draw.maybe(draw.flag()), "drawn": drawn}
    values |= {"key": draw.getrandbits(62), "payload": empty(draw, levels_form(n, group, count))}
    values |= {"scratch": draw.garbage(groups + draw.choice((0, 0, 3)), "uint32")}

    def check() -> None:
        copies, cuts = copy(values), np.zeros(groups, f32)
        header, found, words = arrays_of(copies["payload"], levels_form(n, group, count))
        given = copies["bounds"], copies["flag"], values["form"]
        extension.native.find_levels(copies["residual"], *given, group, count, found, cuts, header)
        cut = None if drawn else cuts
        extension.native.take_levels(copies["residual"], found, cut, group, count, values["key"], words)
        check_written(values, copies, "payload", "residual")

    return values, check


@maker
def add_and_settle_levels(draw: Draw) -> Made:
    n, count, scale = draw.size(1), draw.choice(levels.COUNTS), draw.factor()
    group = levels.group_of(draw, n)
    ranks = [levels.rank_of(draw, n, group, count) for _ in range(draw.ranks(n) + 1)]
    sent = [payload(draw, [header.was, own.was, words.was]) for own, words, header in ranks]
    values = {"target": draw.lend(draw.floats(n)), "residual": draw.lend(draw.floats(n)), "group": group, "count": count}
    values |= {"counters": counters(draw)}

    def check() -> None:
        copies, (own, *others) = copy(values), (arrays_of(each.was, levels_form(n, group, count)) for each in sent)
        headers, found, words = ([parts[i] for parts in others] for i in range(3))
        extension.native.add_levels(copies["target"], found, words, headers, group, count, scale)
        extension.native.settle_levels(copies["residual"], *own[1:], group, count, copies["target"])
        check_written(values, copies, "target", "residual", "counters")

    return {**values, "payloads": sent[1:], "scale": scale, "own": sent[0]}, check


@maker
def write_header(draw: Draw) -> Made:
    flag, header = draw.maybe(draw.flag()), draw.garbage(2, "int32")

    def check() -> None:
        expect(header.now.tolist() == [0, 0 if flag is None else flag.was[0]], f"the header is {header.now}")

    return {"flag": flag, "header": header}, check
