"""How far what ranks send is from what they were to send: sums of squares, of every tenth step of a run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import gradcomp
from gradcomp.engine.wrapper import Wrapper
from gradcomp.native import kernels
from gradcomp.protocol import Acc, Steps
from gradcomp.requests import World

EVERY = 10
"""Steps of which one is looked at: that costs two passes over what every rank was to send."""


class Errors:
    """Of each step that is looked at, two squares, summed over ranks and entries: of what was to be sent, and of what was not.

    A compressor takes what it sends out of the tensor, with error feedback or without. So what is left there is the error of
    what this rank sent in this very training, whatever the algorithm, and nothing changes by looking. What route=alltoall
    rounds a second time is part of it, and so is what sdagc's sam leaves behind on purpose.
    """

    def __init__(self, simulation: gradcomp.Simulation):
        self.meant: list[float] = []
        self.left: list[float] = []
        self.looking = False
        for reducer in simulation._reducers:
            for bucket in reducer.buckets:
                bucket.source = replace(bucket.source, inner=Watched(bucket.source.inner, self))

    def begin(self, step: int) -> None:
        """To be called before each step, counted from 1."""
        self.looking = (step - 1) % EVERY == 0
        if self.looking:
            self.meant.append(0.0)
            self.left.append(0.0)

    def note(self, meant: float, left: float) -> None:
        self.meant[-1] += meant
        self.left[-1] += left

    def squares(self) -> dict[str, list[float]]:
        """As a record keeps them."""
        return {"meant": self.meant, "left": self.left}


@dataclass(frozen=True)
class Watched(Wrapper):
    """A bucket's compressor, and what is noted of its exchanges."""

    errors: Errors

    def within(self, state: Any) -> Any:
        return state

    def exchange(self, acc: Acc, state: Any, world: World) -> Steps:
        if not self.errors.looking:
            return (yield from self.inner.exchange(acc, state, world))
        meant = _square(acc.residual)
        update = yield from self.inner.exchange(acc, state, world)
        self.errors.note(meant, _square(acc.residual))
        return update


def _square(value: Tensor) -> float:
    """Summed in float64."""
    found = torch.empty(1, dtype=torch.float64)
    kernels.sum_squares([value], found)
    return float(found)
