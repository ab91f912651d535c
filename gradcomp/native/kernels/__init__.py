"""The kernels as Python functions, one for each C++ function. csrc/ops.inc has their contracts.

memory: the lender of a kernel's scratch; None takes fresh memory in every call.
"""

from gradcomp.native.kernels.blocks import (
    add_and_settle_blocks,
    add_blocks,
    block_words,
    read_blocks,
    settle_blocks,
    take_blocks,
)
from gradcomp.native.kernels.gradients import (
    collect,
    flatten,
    offer_all,
    scratch_of_squares,
    settle_all,
    spread,
    sum_squares,
    write_header,
)
from gradcomp.native.kernels.levels import (
    LEVEL_RULES,
    PER_WORD,
    add_and_settle_levels,
    add_levels,
    find_and_take_levels,
    find_levels,
    groups,
    settle_levels,
    take_levels,
    words,
)
from gradcomp.native.kernels.progress import deliver_progress, offer_progress
from gradcomp.native.kernels.sketches import heaviest, sketch
from gradcomp.native.kernels.sparse import (
    BLOCK,
    VALUE_BITS,
    Bar,
    add_and_settle_packed,
    add_packed,
    add_sparse,
    note_sent,
    pack_sparse,
    packed_words,
    set_thresholds,
    settle_packed,
    settle_sparse,
    steer,
    take_above,
    take_above_and_pack,
    take_topk,
    take_topk_and_pack,
    unpack_sparse,
)
