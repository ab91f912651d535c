"""The kernels as Python functions, one for each C++ function. csrc/ops.inc has their contracts.

memory: the lender of a kernel's scratch; None takes fresh memory in every call.
"""

from gradcomp.native.kernels.gradients import (
    Adaptive,
    accumulate,
    add_back,
    flatten,
    have_failed,
    may_have_failed,
    offer_all,
    peaks,
    settle_all,
    spread,
    sum_squares,
)
from gradcomp.native.kernels.levels import (
    LEVEL_RULES,
    PER_WORD,
    add_levels,
    find_levels,
    groups,
    settle_levels,
    take_levels,
    words,
)
from gradcomp.native.kernels.sketches import heaviest, sketch
from gradcomp.native.kernels.sparse import (
    Mask,
    add_packed,
    add_sparse,
    pack_sparse,
    set_thresholds,
    settle_packed,
    settle_sparse,
    steer,
    take_above,
    take_topk,
    unpack_sparse,
)

__all__ = [
    "LEVEL_RULES",
    "PER_WORD",
    "Adaptive",
    "Mask",
    "accumulate",
    "add_back",
    "add_levels",
    "add_packed",
    "add_sparse",
    "find_levels",
    "flatten",
    "groups",
    "have_failed",
    "heaviest",
    "may_have_failed",
    "offer_all",
    "pack_sparse",
    "peaks",
    "set_thresholds",
    "settle_all",
    "settle_levels",
    "settle_packed",
    "settle_sparse",
    "sketch",
    "spread",
    "steer",
    "sum_squares",
    "take_above",
    "take_levels",
    "take_topk",
    "unpack_sparse",
    "words",
]
