"""The error of what ranks send: sums of squares, in every tenth step of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradcomp.core.compressor import Acc
from gradcomp.core.requests import World
from gradcomp.native import kernels

# One step of so many is measured: it takes two passes over every rank's acc.
STEP_INTERVAL = 10


class Errors:
    """Two sums of squares of each measured step, over ranks and entries: of the acc, and of what is left of it.

    A compressor takes what it sends out of the acc, with error feedback or without. The rest is this training's own error,
    whatever the algorithm. The second rounding of route=alltoall is part of it, and so is what sdagc's sam leaves on purpose.
    """

    def __init__(self) -> None:
        self.meant: list[float] = []
        self.left: list[float] = []
        self._looking = False

    def begin(self, step: int) -> None:
        """Note that a step begins, counted from 1."""
        self._looking = (step - 1) % STEP_INTERVAL == 0
        if self._looking:
            self.meant.append(0.0)
            self.left.append(0.0)

    def before(self, acc: Acc, state: Any, world: World) -> None:
        """Add the square of what is to be sent."""
        self.note([acc.residual], [])

    def after(self, acc: Acc, state: Any, world: World) -> None:
        """Add the square of what was not sent."""
        self.note([], [acc.residual])

    def note(self, meant: Sequence[Tensor], left: Sequence[Tensor]) -> None:
        """Add the squares of one rank's tensors: of what is to be sent, and of what was not sent."""
        if self._looking:
            self.meant[-1] += sum(map(_square, meant))
            self.left[-1] += sum(map(_square, left))

    def squares(self) -> dict[str, list[float]]:
        """Return both sums of every measured step, as a record keeps them."""
        return {"meant": self.meant, "left": self.left}


def _square(values: Tensor) -> float:
    found = torch.empty(1, dtype=torch.float64)
    kernels.sum_squares([values.flatten()], found)
    return float(found)
