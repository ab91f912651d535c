"""Calls of the kernels of blocks: payloads that the rounding kernel made, such with bytes changed, and any bytes."""

from __future__ import annotations

import numpy as np
from fuzz.call import Made, expect, maker
from fuzz.chains import arrays_of, check_written, copy, counters, empty, payload
from fuzz.drawn import Content, Draw, Lent, same
from fuzz.gradients import cast, now
from fuzz.sparse import f32

from gradcomp.native import extension, kernels

ENTRIES, GROUP = 4096, 32


def form_of(n: int, bits: int) -> list[tuple[str, int]]:
    return [("int32", 2), ("uint32", kernels.block_words(n, bits))]


def said_by(words: Content, n: int, bits: int) -> tuple[Content, Content, list[bool]]:
    """Read a payload's words. Return the entries, whether each of them is sent, and whether each block is sound."""
    said, there, sound, at = np.zeros(n, f32), np.zeros(n, bool), [], 0
    for begin in range(0, n, ENTRIES):
        count = min(ENTRIES, n - begin)
        groups = -(-count // GROUP)
        codes = at + 1 + -(-groups // 4)
        top, height = int(words[at]) & 0xFFFF, int(words[at]) >> 16
        depths = words[at + 1 : codes].view(np.uint8)[:groups].astype(np.int64)
        widths = np.where(depths >= 254, 255 - depths, np.clip((height - depths) >> 4, 2, 8))
        fits = bool(((depths >= 254) | (depths + 128 <= top)).all())
        sound.append(top < 0x7F8 and fits and widths.sum() <= groups * bits)
        at = codes + groups * bits
        for group, (depth, width) in enumerate(zip(depths, widths, strict=True) if sound[-1] else []):
            first = begin + group * GROUP
            own = words[codes : codes + width]
            codes += width
            there[first : first + GROUP] = depth != 255
            if depth == 254:
                said[first : first + GROUP] = own.view(f32)[0]
            elif depth != 255:
                planes = np.unpackbits(own.view(np.uint8), bitorder="little").reshape(width, GROUP).astype(np.int64)
                last = 2 ** (int(width) - 1) - 1
                step = np.array([(top - depth) << 20], np.uint32).view(f32) / f32(last)
                number = ((planes << np.arange(width)[:, None]).sum(0) - last).astype(f32)
                said[first : first + GROUP] = (number * step)[: n - first]
    return said, there, sound


def sent(draw: Draw, n: int, bits: int) -> Lent:
    """Lend a payload; every third one with bytes changed, or with any bytes."""
    made = np.zeros(8 + 8 * -(-kernels.block_words(n, bits) // 2), np.uint8)
    flag = np.array([int(draw.likely(0.1))], np.int32)
    extension.native.take_blocks(draw.floats(n, 0.1).copy(), flag, bits, made)
    header, words = (part.copy() for part in arrays_of(made, form_of(n, bits)))
    luck = draw.random()
    if luck < 0.1:
        words = draw.words(len(words), "uint32").copy()
    elif luck < 0.35:
        for _ in range(draw.randrange(4)):
            words.view(np.uint8)[draw.randrange(min(words.nbytes, draw.choice((4, 40, words.nbytes))))] = draw.randrange(256)
    return payload(draw, [header, words])


def added(target: Content, payloads: list[Lent], bits: int, scale: Content) -> tuple[Content, bool]:
    """Add payloads to a target. Return it, and whether no payload was flagged or malformed."""
    well, n = True, len(target)
    for each in payloads:
        header, words = arrays_of(each.was, form_of(n, bits))
        said, there, sound = said_by(words, n, bits)
        target = np.where(there, target + scale * said, target)
        well = well and all(sound) and header[1] == 0
    return target, well


@maker
def take_blocks(draw: Draw) -> Made:
    n, bits = draw.size(1), draw.randrange(2, 9)
    residual, flag, to = draw.lend(draw.floats(n)), draw.maybe(draw.flag()), empty(draw, form_of(n, bits))

    def check() -> None:
        header, words = arrays_of(to.now, form_of(n, bits))
        said, there, sound = said_by(words, n, bits)
        expect(header.tolist() == [0, 0 if flag is None else flag.was[0]], "the header is wrong")
        finite = [bool(np.isfinite(residual.was[at : at + ENTRIES]).all()) for at in range(0, n, ENTRIES)]
        expect(sound == finite, "a block is malformed, or hides an entry that is not finite")
        left = np.where(there, residual.was - said, residual.was)
        expect(same(residual.now, left), "the residual is not what the payload leaves")

    return {"residual": residual, "flag": flag, "bits": bits, "payload": to}, check


@maker
def add_blocks(draw: Draw) -> Made:
    n, bits, scale = draw.size(1), draw.randrange(2, 9), draw.factor()
    target = draw.lend(draw.floats(n))
    payloads = [sent(draw, n, bits) for _ in range(draw.ranks(n))]

    def check() -> None:
        wanted, well = added(target.was, payloads, bits, f32(scale))
        if not well:
            wanted[0] = np.nan
        expect(same(target.now, wanted), "the sums are wrong")

    return {"target": target, "payloads": payloads, "bits": bits, "scale": scale}, check


@maker
def read_blocks(draw: Draw) -> Made:
    n, bits = draw.size(1), draw.randrange(2, 9)
    to, own = draw.pieces(n), sent(draw, n, bits)

    def check() -> None:
        header, words = arrays_of(own.was, form_of(n, bits))
        said, there, sound = said_by(words, n, bits)
        x, at = np.where(there, said + f32(0), f32(0)), 0
        x[::ENTRIES] = np.where(sound, x[::ENTRIES], f32(np.nan)) if header[1] == 0 else np.nan
        for piece in to:
            expect(same(now(piece), cast(x[at : at + len(piece)], piece)), "a piece is not what was sent")
            at += len(piece)

    return {"payload": own, "bits": bits, "to": to}, check


@maker
def settle_blocks(draw: Draw) -> Made:
    n, bits = draw.size(1), draw.randrange(2, 9)
    residual, update, own = draw.lend(draw.floats(n)), draw.lend(draw.floats(n)), sent(draw, n, bits)

    def check() -> None:
        kept = residual.was if np.isfinite(update.was[0]) else added(residual.was, [own], bits, f32(1))[0]
        expect(same(residual.now, kept), "the residual is wrong")

    return {"residual": residual, "own": own, "bits": bits, "update": update}, check


@maker
def add_and_settle_blocks(draw: Draw) -> Made:
    n, bits, scale = draw.size(1), draw.randrange(2, 9), draw.factor()
    values = {"target": draw.lend(draw.floats(n)), "residual": draw.lend(draw.floats(n)), "bits": bits, "scale": scale}
    values |= {"counters": counters(draw)}
    own, *payloads = [sent(draw, n, bits) for _ in range(draw.ranks(n) + 1)]

    def check() -> None:
        copies = copy(values)
        extension.native.add_blocks(copies["target"], [each.was for each in payloads], bits, scale)
        extension.native.settle_blocks(copies["residual"], own.was, bits, copies["target"])
        check_written(values, copies, "target", "residual", "counters")

    return {**values, "payloads": payloads, "own": own}, check
