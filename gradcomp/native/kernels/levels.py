"""Kernels that round entries to the levels of their group."""

from __future__ import annotations

from collections.abc import Sequence

from gradcomp.native import extension
from gradcomp.native.extension import Array, launches, queue, scratch_words
from gradcomp.native.memory import Memory

# Rules for a group's levels, in the order of csrc/math_levels.h.
LEVEL_RULES = ("optimal", "partly", "mean", "lloyd", "peak", "norm", "range", "quantile", "sign")
# The smallest remainder that becomes a group. A smaller one joins the last group.
SHORTEST_GROUP = 32
# Codes in a word of 64 bits, by the number of levels.
PER_WORD = {2: 64, 3: 40, 5: 27, 9: 20}


def groups(n: int, group: int) -> int:
    """Count the groups of n entries. A remainder of fewer than 32 entries joins the last group."""
    return 1 if n < group else n // group + (n % group >= SHORTEST_GROUP)


def words(n: int, group: int, count: int) -> int:
    """Count the words for the codes of n entries. Each group begins a new word."""
    last = groups(n, group) - 1
    return last * -(-group // PER_WORD[count]) + -(-(n - last * group) // PER_WORD[count])


def find_levels(
    flat: Array, rule: str, group: int, count: int, levels: Array, cuts: Array, bounds: Array | None = None
) -> None:
    """Find `count` levels for each group by one of LEVEL_RULES. cuts <- the least entry that rounds up without randomness."""
    form = LEVEL_RULES.index(rule)
    extension.native.find_levels(flat, bounds, None, form, group, count, levels, cuts, None, **queue(flat))


def take_levels(
    residual: Array, levels: Array, group: int, count: int, key: int, words: Array, cuts: Array | None = None
) -> None:
    """Round the residual to its groups' levels, by draws or at cuts; residual <- the rounding error, words <- the codes."""
    extension.native.take_levels(residual, levels, cuts, group, count, key, words, **queue(residual))


def add_levels(
    target: Array,
    levels: Sequence[Array],
    words: Sequence[Array],
    headers: Sequence[Array],
    group: int,
    count: int,
    scale: float = 1.0,
) -> None:
    """Add scale * the levels that the words name, rank by rank. A flagged header makes target[0] NaN."""
    for few in launches("add_levels", levels=levels, words=words, headers=headers):
        extension.native.add_levels(target, levels[few], words[few], headers[few], group, count, scale, **queue(target))


def settle_levels(residual: Array, levels: Array, words: Array, group: int, count: int, update: Array) -> None:
    """Put the taken levels back unless update[0] is finite."""
    extension.native.settle_levels(residual, levels, words, group, count, update, **queue(residual))


def find_and_take_levels(
    residual: Array,
    rule: str,
    group: int,
    levels: int,
    key: int,
    payload: Array,
    drawn: bool = True,
    bounds: Array | None = None,
    flag: Array | None = None,
    memory: Memory | None = None,
) -> None:
    """Do what find_levels() and take_levels() do: payload <- header, all levels and words, in bytes. drawn: not by cuts."""
    words = scratch_words(extension.native, "find_and_take_levels", residual.is_cuda, residual.numel(), group)
    scratch, form = (memory or Memory()).scratch("cuts", words, residual), LEVEL_RULES.index(rule)
    extension.native.find_and_take_levels(
        residual, bounds, flag, form, group, levels, drawn, key, payload, scratch, **queue(residual)
    )


def add_and_settle_levels(
    update: Array,
    payloads: Sequence[Array],
    group: int,
    count: int,
    scale: float,
    residual: Array,
    own: Array,
    memory: Memory | None = None,
) -> None:
    """Do what add_levels() does, for the payloads of at most MOST_RANKS ranks, and settle_levels() with the sums as the update.

    own: the payload that this rank sent. Payloads are given in bytes.
    """
    arrays = residual, own, (memory or Memory()).counters(residual)
    extension.native.add_and_settle_levels(update, payloads, group, count, scale, *arrays, **queue(residual))
