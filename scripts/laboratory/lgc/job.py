"""A training on simulated ranks that measurements of lgc look into, step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import gradcomp
from gradcomp.core.compressor import Acc
from gradcomp.core.requests import World
from laboratory.tasks import training
from laboratory.tasks.table import TASKS
from laboratory.tasks.training import Grads

TASK = "resnet"

See = Callable[[gradcomp.Simulation, list[Grads]], Grads]


class Accs:
    """A copy of every rank's acc in one step, before lgc takes from it, and the slice that travels as codes."""

    def __init__(self) -> None:
        self.of_ranks: list[Tensor] = []
        self.middle = slice(0)

    def before(self, acc: Acc, state: Any, world: World) -> None:
        """Copy a rank's acc."""
        self.of_ranks.append(acc.residual.clone())
        self.middle = state.middle

    def after(self, acc: Acc, state: Any, world: World) -> None:
        """Leave the rest alone."""

    def pop(self) -> Tensor:
        """Return what travels as codes, [ranks, entries], and forget the step."""
        found = torch.stack(self.of_ranks)[:, self.middle]
        self.of_ranks.clear()
        return found


def walk(spec: str, steps: int, seed: int, ranks: int, see: See, accs: Accs | None = None) -> Iterator[float]:
    """Train, and yield each step's loss. see() performs the exchange, and records what it likes."""
    settings = TASKS[TASK].defaults._replace(steps=steps)
    job = TASKS[TASK].make(settings, seed, ranks, {})
    optimizer = training.optimizer_of(TASKS[TASK], settings, job.model)
    shapes = {name: p.shape for name, p in job.model.named_parameters()}
    simulation = gradcomp.Simulation(spec if accs is None else training.watched(spec, accs), shapes, ranks, seed)
    return training.descend(TASKS[TASK], settings, job, optimizer, lambda step, grads: see(simulation, grads))
