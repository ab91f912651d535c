"""How far what ranks send is from what they were to send: sums of squares, of every tenth step of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import gradcomp
from gradcomp import kernels
from gradcomp.core import Acc, Compressor, Layout, Steps, World
from gradcomp.wrap import Memory, Rates, Source

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
        for reducer in simulation.reducers:
            for bucket in reducer.buckets:
                bucket.source = Watched(bucket.source, self)

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
class Watched:
    """A bucket's source of gradients, and what is noted of its exchanges."""

    source: Source
    errors: Errors

    @property
    def inner(self) -> Compressor:
        return self.source.inner

    @property
    def whole_model(self) -> bool:
        return self.source.whole_model

    def init(self, layout: Layout, seed: int) -> Memory:
        return self.source.init(layout, seed)

    def collect(self, grads: Sequence[Tensor], memory: Memory, ranks: int, rates: Rates) -> Acc:
        return self.source.collect(grads, memory, ranks, rates)

    def exchange(self, acc: Acc, state: Memory, world: World) -> Steps:
        if not self.errors.looking:
            return (yield from self.source.exchange(acc, state, world))
        meant = _square(acc.value)
        update = yield from self.source.exchange(acc, state, world)
        self.errors.note(meant, _square(acc.value))
        return update


def _square(value: Tensor) -> float:
    """Summed in float64."""
    found = torch.empty(1, dtype=torch.float64)
    kernels.sum_squares([value], found)
    return float(found)
