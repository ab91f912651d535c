"""Kernels that round entries within a block's budget of bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradcomp.native import extension
from gradcomp.native.extension import MOST_PIECES, Array, launches, queue
from gradcomp.native.memory import Memory

# Entries of a group, which share a scale, and groups of a block, which share a budget.
GROUP, GROUPS = 32, 128


def block_words(n: int, bits: int) -> int:
    """Count the words of 32 bits for n entries: for each block one, a byte for a group, and `bits` for each group."""
    blocks, rest = divmod(n, GROUP * GROUPS)
    groups = -(-rest // GROUP)
    return blocks * (1 + GROUPS // 4 + GROUPS * bits) + (1 + -(-groups // 4) + groups * bits if groups else 0)


def take_blocks(residual: Array, bits: int, payload: Array, flag: Array | None = None) -> None:
    """Round the residual within its blocks' budget; residual <- the rounding error, payload <- header and words, in bytes."""
    extension.native.take_blocks(residual, flag, bits, payload, **queue(residual))


def add_blocks(target: Array, payloads: Sequence[Array], bits: int, scale: float = 1.0) -> None:
    """Add scale * the entries of payloads, rank by rank. A flagged or malformed payload makes target[0] NaN."""
    for few in launches("add_blocks", payloads=payloads):
        extension.native.add_blocks(target, payloads[few], bits, scale, **queue(target))


def read_blocks(payload: Array, bits: int, to: Sequence[Array]) -> None:
    """Read a payload's entries into arrays, cast to the type of each. A flagged or malformed block's first entry is NaN."""
    if len(to) > MOST_PIECES:
        sizes = [each.numel() for each in to]
        flat = torch.empty(sum(sizes), device=payload.device)
        read_blocks(payload, bits, [flat])
        torch._foreach_copy_([*to], [*flat.split_with_sizes(sizes)])
        return
    extension.native.read_blocks(payload, bits, to, **queue(payload))


def settle_blocks(residual: Array, own: Array, bits: int, update: Array) -> None:
    """Put the taken entries back unless update[0] is finite."""
    extension.native.settle_blocks(residual, own, bits, update, **queue(residual))


def add_and_settle_blocks(
    update: Array,
    payloads: Sequence[Array],
    bits: int,
    scale: float,
    residual: Array,
    own: Array,
    memory: Memory | None = None,
) -> None:
    """Do what add_blocks() does, for the payloads of at most MOST_RANKS ranks, and settle_blocks() with the sums."""
    counters = (memory or Memory()).counters(residual)
    extension.native.add_and_settle_blocks(update, payloads, bits, scale, residual, own, counters, **queue(residual))
