"""The plan of a comparison: clusters, models and specs, and the launches and runs that they need."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

import gradcomp
from laboratory.study.runs import Run
from laboratory.tasks import digits
from laboratory.tasks.table import TASKS
from laboratory.tasks.task import Settings
from laboratory.train.launch import Launch

TASK = "mlp"
# Steps of a spec in one round, at most.
MOST_STEPS = 8

# The published throughput of gs_sgd, at least, over others that send as many entries.
CLAIMED_THROUGHPUTS = {"gtopk": 1.3, "sketched_sgd": 1.1}

# The specs that are measured first, so that the specs of a claim share a launch.
FIRST_SPECS = (*CLAIMED_THROUGHPUTS, "gs_sgd")

# The memory of a rank without a model.
RANK_BYTES = 0.25e9

# Arrays of the model's size: those that every spec keeps (weights, residual, momentum), and those that a rank's specs use in
# turns (gradients, update, payload).
ARRAYS, SHARED = 3, 3


class Plan(NamedTuple):
    """Everything that decides the launches and runs of a comparison."""

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
        """List the clusters: hosts and rate."""
        return list(itertools.product(self.hosts, self.rates))

    def settings(self, width: int) -> Settings:
        """Return the settings of a model's training. Its steps are timed with the same batches and momentum."""
        return TASKS[TASK].defaults._replace(width=width, lr=self.lr, steps=self.steps[self.widths.index(width)])

    def runs(self, width: int) -> list[Run]:
        """List the trainings seed by seed: whenever they are interrupted, all specs have come equally far."""
        return [Run(TASK, spec, seed, self.ranks, self.settings(width)) for seed in range(self.seeds) for spec in self.specs]

    def launches(self, hosts: int, rate: str, width: int) -> list[Launch]:
        """List the launches of a cluster, as few as the memory allows. `none` in each makes them comparable."""
        settings = self.settings(width)
        return [
            Launch(self.launcher, hosts, rate, TASK, settings, ["none", *specs], self.rounds, MOST_STEPS, self.turn)
            for specs in self._parts(hosts, width)
        ]

    def _parts(self, hosts: int, width: int) -> Iterator[list[str]]:
        ordered = sorted(self.specs, key=lambda spec: (*FIRST_SPECS, kind(spec)).index(kind(spec)))
        fitting = len(ordered)
        while fitting > 1 and bytes_needed(hosts, width, 1 + fitting) > self.memory * 1e9:
            fitting -= 1
        for first in range(0, len(ordered), fitting):
            yield ordered[first : first + fitting]


def kind(spec: str) -> str:
    """Return the name of a spec's compressor."""
    return spec.partition(":")[0]


def share(spec: str) -> float | None:
    """Return the share of entries that a spec sends; None if it has no knob for that."""
    made: Any = gradcomp.make(spec)
    return getattr(getattr(made, "inner", made), "ratio", None)


def peer(spec: str, of: str, specs: list[str]) -> str | None:
    """Return the spec of this kind that sends the same share of entries, or the first one for a spec without a share."""
    own = share(spec)
    return next((other for other in specs if kind(other) == of and own in (None, share(other))), None)


def parameters(width: int) -> int:
    """Count the parameters of a model of this width."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in digits.model(width=width).parameters())


def bytes_needed(hosts: int, width: int, specs: int) -> float:
    """Estimate the memory of a launch: its ranks share this machine."""
    return hosts * (RANK_BYTES + 4 * parameters(width) * (ARRAYS * specs + SHARED))
