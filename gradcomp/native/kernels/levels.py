"""Kernels of entries that are rounded to the levels of their group."""

from __future__ import annotations

from collections.abc import Sequence

from gradcomp.native import extension
from gradcomp.native.extension import Array, launches, queue

FORMS = ("optimal", "partly", "mean", "lloyd", "peak", "norm", "range", "quantile", "sign")
"""What a group's levels can follow from; csrc/levels.h has them in the same order."""


SHORTEST_GROUP = 32
PER_WORD = {2: 64, 3: 40, 5: 27, 9: 20}
"""How many numbers of so many levels a word of 64 bits holds."""


def groups(n: int, group: int) -> int:
    """How many groups n entries make: what is left over is one of its own, or if it is short, the end of the last one."""
    return 1 if n < group else n // group + (n % group >= SHORTEST_GROUP)


def words(n: int, group: int, count: int) -> int:
    """Words that the numbers of n entries' levels take: each group begins with a new one."""
    last = groups(n, group) - 1
    return last * -(-group // PER_WORD[count]) + -(-(n - last * group) // PER_WORD[count])


def find_levels(
    value: Array, form: str, group: int, count: int, levels: Array, cuts: Array, bounds: Array | None = None
) -> None:
    """levels <- so many for each group of entries; cuts <- where two levels that are not drawn meet."""
    extension.native.find_levels(value, bounds, FORMS.index(form), group, count, levels, cuts, **queue(value))


def take_levels(value: Array, levels: Array, group: int, count: int, key: int, words: Array, cuts: Array | None = None) -> None:
    """Rounds value to its groups' levels, by draws or at cuts; value <- what that leaves over, words <- the levels' numbers."""
    extension.native.take_levels(value, levels, cuts, group, count, key, words, **queue(value))


def add_levels(
    target: Array,
    levels: Sequence[Array],
    words: Sequence[Array],
    headers: Sequence[Array],
    group: int,
    count: int,
    scale: float = 1.0,
) -> None:
    """target += scale * the levels that words name, of several ranks, one after the other; where a header is flagged,
    target[0] becomes NaN."""
    for few in launches(len(headers)):
        extension.native.add_levels(target, levels[few], words[few], headers[few], group, count, scale, **queue(target))


def settle_levels(value: Array, levels: Array, words: Array, group: int, count: int, update: Array, keep: float = 0.0) -> None:
    """What was taken leaves keep times itself behind; all of it goes back if the update is not finite (update[0] says so)."""
    extension.native.settle_levels(value, levels, words, group, count, update, keep, **queue(value))
