"""The dense exchange: all entries of a bucket, averaged over the ranks."""

from __future__ import annotations

from torch import Tensor

from gradcomp.core.compressor import Acc, Steps
from gradcomp.core.requests import World, reduce
from gradcomp.native import kernels
from gradcomp.native.memory import Update


def allreduce(acc: Acc, world: World, buffer: Tensor, kept_share: float = 0.0) -> Steps:
    """Send all entries of acc. All entries stay if the update is not finite.

    buffer: as long as the bucket; it becomes the update. kept_share: this share of a sent entry stays.
    """
    offered = kernels.offer_all(acc.residual, buffer, acc.flag, world.share)
    update = yield from reduce(offered, world.mean_of_shares)
    kernels.settle_all(acc.residual, update, kept_share)
    if acc.mask is not None:
        acc.mask.note_all(update[:1].isfinite())
    return Update(update)
