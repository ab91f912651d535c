"""The parts of a fuzzed call: sizes around borders, contents of every kind, and arrays between guard bands."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import torch

Content = np.ndarray[Any, Any]

# A band of this byte lies before and behind an array.
GUARD, GUARD_BYTE = 64, 0xA5

# Sizes at which kernels change their ways: vectors, lines, blocks, samples; then packed blocks and tiles; then threads.
BORDERS = (16, 32, 64, 128, 1024, 2048, 4096, 8192)
WIDE_BORDERS = (16_384, 65_536, 131_072)
THREADED = 2 * 2**18 + 2049

SPECIALS = np.array(
    [np.inf, -np.inf, np.nan, -0.0, 0.0, 3e38, -3e38, 3.4028235e38, 1e-45, -1e-40, 1.1754944e-38, 1.0], np.float32
)
_MADE = np.random.default_rng(0)
# Contents are slices of these, so that a call costs little.
NORMAL = _MADE.standard_normal(1 << 20).astype(np.float32)
KINDS = {
    "normal": NORMAL,
    "ties": np.round(NORMAL * 2) / 2,
    "zeros": np.zeros_like(NORMAL),
    "spikes": np.where(np.abs(NORMAL) > 2.5, 1e4 * NORMAL, 0).astype(np.float32),
    "tiny": NORMAL * np.float32(1e-39),
    "large": np.clip(NORMAL, -1, 1) * np.float32(3.2e38),
    "mixed": (NORMAL * 10.0 ** _MADE.integers(-44, 37, NORMAL.size)).astype(np.float32),
}
WILD = {
    "bits": _MADE.integers(0, 2**32, NORMAL.size, np.uint32).view(np.float32),
    "specials": np.where(np.abs(NORMAL) > 1.5, SPECIALS[_MADE.integers(0, len(SPECIALS), NORMAL.size)], NORMAL),
}
INTEGERS = np.array([0, 1, -1, 2, 63, 64, 65_535, 65_536, 2**31 - 1, -(2**31), 2**30, -100], np.int64)


class Lent:
    """An array as a kernel gets it, and the memory around it.

    given: of NumPy or torch. now: its entries, in NumPy. was: a copy from before the call.
    """

    def __init__(self, content: Content, draw: random.Random, bfloat16: bool = False):
        size, item = content.nbytes, content.itemsize
        # Half of them end where their memory ends, which AddressSanitizer watches.
        self._at = 0 if draw.random() < 0.5 else GUARD + item * draw.randrange(9)
        self._end = self._at + size
        self._memory = np.empty(self._end + (GUARD if self._at else 0), np.uint8)
        self._memory[: self._at] = GUARD_BYTE
        self._memory[self._end :] = GUARD_BYTE
        self.now: Content = self._memory[self._at : self._end].view(content.dtype)
        self.now[:] = content
        self.was = self.now.copy()
        self.given: Any = self.now
        if bfloat16:
            self.given = torch.from_numpy(self.now).view(torch.bfloat16)
        elif draw.random() < 0.5:
            self.given = torch.from_numpy(self.now)
            if draw.random() < 0.1:
                self.given = self.given.reshape(1, -1, 1)
        self.floats = _widened(self.was, bfloat16)

    def __len__(self) -> int:
        return len(self.was)

    def guarded(self) -> bool:
        """Return whether nothing was written around the array."""
        around = (self._memory[: self._at], self._memory[self._end :])
        return all(bool((band == GUARD_BYTE).all()) for band in around)

    def unchanged(self) -> bool:
        """Return whether nothing was written into it."""
        return self.now.tobytes() == self.was.tobytes()


def _widened(content: Content, bfloat16: bool) -> Content:
    if bfloat16:
        return (content.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return content.astype(np.float32) if content.dtype == np.float16 else content


class Draw(random.Random):
    """All that is random about one call. It follows from the seed, the kernel and the call's number alone."""

    # Calls may have arguments that only CPU twins take: a search in 2^31 places with little scratch, and entries that name a
    # place twice: a GPU adds these in any order.
    for_cpu = True

    def likely(self, share: float) -> bool:
        """Draw true with this probability."""
        return self.random() < share

    def size(self, least: int = 0, wide: bool = True) -> int:
        """Draw a number of entries: mostly small, often at a border, seldom wide, hardly ever enough for threads."""
        luck = self.random()
        if luck < 0.8 or not wide:
            found = int(130 * self.random() ** 2)
        elif luck < 0.985:
            found = self.choice(BORDERS) * self.choice((1, 1, 2, 3)) + self.choice((-1, 0, 1))
        elif luck < 0.9995:
            found = self.choice(WIDE_BORDERS) + self.choice((-1, 0, 1))
        else:
            found = THREADED + self.randrange(100)
        return max(found, least)

    def floats(self, n: int, wild: float = 0.3) -> Content:
        """Draw entries of one kind; with this probability of one with infinities and NaNs."""
        kinds = WILD if self.likely(wild) else KINDS
        kind = kinds[self.choice(list(kinds))]
        at = self.randrange(max(NORMAL.size - n, 1))
        return kind[at : at + n] if n < NORMAL.size else np.resize(kind, n)

    def words(self, n: int, dtype: str) -> Content:
        """Draw whole numbers of any kind, in a type of 8 to 64 bits."""
        if self.likely(0.5):
            return np.frombuffer(self.randbytes(n * np.dtype(dtype).itemsize), dtype)
        return INTEGERS[np.frombuffer(self.randbytes(n), np.uint8) % len(INTEGERS)].astype(dtype)

    def lend(self, content: Content, dtype: str = "") -> Lent:
        """Lend an array with this content. Unsigned words may come as signed ones."""
        if dtype:
            content = np.asarray(content).astype(dtype)
        if content.dtype.kind == "u" and content.dtype != np.uint8 and self.likely(0.5):
            content = content.view(content.dtype.str.replace("u", "i"))
        return Lent(np.ascontiguousarray(content).reshape(-1), self)

    def garbage(self, n: int, dtype: str) -> Lent:
        """Lend an array that a kernel writes before it reads it."""
        return self.lend(np.frombuffer(self.randbytes(n * np.dtype(dtype).itemsize), dtype))

    def pieces(self, n: int) -> list[Lent]:
        """Lend gradients of n entries in all: of every type, some without entries."""
        count = self.choice((0, 1, 1, 2, 3, 7, 224)) if n == 0 else self.choice((1, 1, 2, 3, 7, 224))
        cuts = sorted(self.randrange(n + 1) for _ in range(count - 1))
        ends = [0, *cuts, n] if count else [0]
        own = self.choice(("float32", "float32", "float16", "bfloat16", ""))
        return [self._piece(stop - start, own) for start, stop in itertools.pairwise(ends)]

    def _piece(self, n: int, dtype: str) -> Lent:
        content, dtype = self.floats(n), dtype or self.choice(("float32", "float16", "bfloat16"))
        if dtype == "bfloat16":
            return Lent((content.view(np.uint32) >> 16).astype(np.int16), self, bfloat16=True)
        with np.errstate(all="ignore"):
            return self.lend(content, dtype)

    def factor(self) -> float:
        """Draw a factor of entries."""
        return self.choice((1.0, 1.0, 1 / 3, 0.5, 0.0, -2.0, 1e-45, 3e38, float("inf"), float("nan")))

    def flag(self) -> Lent:
        """Lend a flag: mostly 0."""
        return self.lend(np.array([self.choice((0, 0, 0, 1, 7, -1))], np.int32))

    def header(self, count: int, wild: float = 0.15) -> Lent:
        """Lend a payload's header with this count; with this probability with any other, and seldom with a flag."""
        if self.likely(wild):
            count = self.choice((-1, -(2**31), 2**31 - 1, count + 1, max(count - 1, 0), 65_536))
        return self.lend(np.array([count, self.choice((0,) * 12 + (1, -1))], np.int32))

    def maybe(self, lent: Lent, share: float = 0.5) -> Lent | None:
        """Lend it, or nothing."""
        return lent if self.likely(share) else None

    def ranks(self, n: int) -> int:
        """Draw a number of ranks: few where they have much to say, seldom as many as one launch takes."""
        return 64 if n < 500 and self.likely(0.01) else self.choice((1, 1, 2, 3 if n < 5000 else 1))

    def places(self, n: int, k: int) -> Content:
        """Draw k different places of n, in order."""
        chosen = self.sample(range(n), k) if k < 2000 else np.random.default_rng(self.getrandbits(32)).permutation(n)[:k]
        return np.sort(np.array(chosen, np.int32))


def same(a: Content, b: Content) -> bool:
    """Compare to the last bit; any NaN is like any other."""
    if a.tobytes() == b.tobytes():
        return True
    return bool((((a == b) & (np.signbit(a) == np.signbit(b))) | (np.isnan(a) & np.isnan(b))).all())


def keys(x: Content) -> Content:
    """Order floats by magnitude, as math.h does."""
    return np.ascontiguousarray(x, np.float32).view(np.int32) & 0x7FFFFFFF
