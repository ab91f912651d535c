"""The norm of this rank's gradients before their exchange: afterwards they hold updates, with another norm.

It costs a read of all gradients, and so only steps that follow a call of stats() measure it. On a GPU no step waits for it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradcomp.engine.bucket import Bucket
from gradcomp.engine.stages.stage import squares_of
from gradcomp.native.memory import HostCopy, Memory

# Steps after a question in which the norm is measured: those until the next question of a log.
WATCHED = 100


class GradientNorm:
    """The norm of all gradients of a step on this rank, without the loss scale. memory: the lender of scratch.

    measures: the step under way does.
    """

    def __init__(self, memory: Memory):
        self._memory, self._steps_left, self.measures = memory, 0, False
        self._sums: dict[torch.device, Tensor] = {}
        self._copies: list[HostCopy] = []

    def begin_step(self, is_wanted: bool) -> None:
        """Decide whether the step measures. is_wanted: somebody else than stats() asks."""
        self.measures, self._sums = is_wanted or self._steps_left > 0, {}

    def add(self, bucket: Bucket, loss_scale: Tensor | None) -> Tensor:
        """Add a bucket's gradients, which are complete. Return the squares of each."""
        device, squares = bucket.layout.device, squares_of(bucket.ordered_grads, loss_scale, self._memory)
        total = squares.sum().view(1)
        self._sums[device] = self._sums[device] + total if device in self._sums else total
        return squares

    def end_step(self) -> None:
        """Begin the copies to main memory, if stats() have asked."""
        if self._steps_left <= 0:
            return
        self._steps_left -= 1
        self._copies = [HostCopy(total) for total in self._sums.values()]

    def asked(self) -> float | None:
        """Return the norm in the last step that measured it, and let the next steps measure. None: no step has."""
        self._steps_left = WATCHED
        return math.sqrt(sum(copy.all()[0] for copy in self._copies)) if self._copies else None
