"""What is compared: clusters, models and specs, and what has to be measured and trained for that."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import digits
import torch
from benchlib.train import Launch
from studylib.runs import Run
from studylib.tasks import TASKS, Settings

import gradcomp

TASK = "mlp"
MOST_STEPS = 8
"""Of a spec in one round, however short they are."""

CLAIMED = {"gtopk": 1.3, "sketched_sgd": 1.1}
"""gs_sgd's throughput is said to be at least so many times that of these, where as many entries are sent."""
FIRST = (*CLAIMED, "gs_sgd")
"""What claims are about is measured first, so that it meets in one launch."""

RANK, ARRAYS, SHARED = 0.25e9, 3, 3
"""Bytes of a rank without a model, and arrays of the model's size: those that every spec keeps (weights, residual, momentum),
and those that a rank's specs use in turn (gradients, the update, what is on its way)."""


class Plan(NamedTuple):
    """Everything that decides which launches and runs belong to a comparison."""

    hosts: list[int]
    rates: list[str]
    widths: list[int]
    steps: list[int]
    specs: list[str]
    seeds: int
    lr: float
    ranks: int
    rounds: int
    turn: float
    memory: float
    launcher: str

    def clusters(self) -> list[tuple[int, str]]:
        return list(itertools.product(self.hosts, self.rates))

    def settings(self, width: int) -> Settings:
        """How a model of this width is trained; it is timed with the same batches and the same momentum."""
        return TASKS[TASK].defaults._replace(width=width, lr=self.lr, steps=self.steps[self.widths.index(width)])

    def runs(self, width: int) -> list[Run]:
        """Seed by seed, so that every spec has come as far as the others whenever this is interrupted."""
        return [Run(TASK, spec, seed, self.ranks, self.settings(width)) for seed in range(self.seeds) for spec in self.specs]

    def launches(self, hosts: int, rate: str, width: int) -> list[Launch]:
        """As few as the memory allows; `none` is in each, the measure of what was not measured together."""
        settings = self.settings(width)
        times = {"rounds": self.rounds, "steps": MOST_STEPS, "turn": self.turn}
        trained = {"batch": settings.batch, "momentum": settings.momentum}
        return [
            Launch(self.launcher, hosts, rate, width, ["none", *specs], **times, **trained)  # type: ignore[arg-type]
            for specs in self._parts(hosts, width)
        ]

    def _parts(self, hosts: int, width: int) -> Iterator[list[str]]:
        ordered = sorted(self.specs, key=lambda spec: (*FIRST, kind(spec)).index(kind(spec)))
        fitting = len(ordered)
        while fitting > 1 and bytes_needed(hosts, width, 1 + fitting) > self.memory * 1e9:
            fitting -= 1
        for first in range(0, len(ordered), fitting):
            yield ordered[first : first + fitting]


def kind(spec: str) -> str:
    return spec.partition(":")[0]


def share(spec: str) -> float | None:
    """The share of entries that a spec sends; None if that is none of its knobs."""
    made: Any = gradcomp.make(spec)
    return getattr(getattr(made, "inner", made), "ratio", None)


def peer(spec: str, of: str, specs: list[str]) -> str | None:
    """The spec of this kind that sends the same share of entries; for those that have no share, the first one."""
    own = share(spec)
    return next((other for other in specs if kind(other) == of and own in (None, share(other))), None)


def parameters(width: int) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in digits.model(width=width).parameters())


def bytes_needed(hosts: int, width: int, specs: int) -> float:
    """The memory of all ranks of a launch, which share this machine."""
    return hosts * (RANK + 4 * parameters(width) * (ARRAYS * specs + SHARED))
