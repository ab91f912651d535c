"""A training with simulated ranks in one process."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import gradcomp
from laboratory.harness import local_steps, ways
from laboratory.harness.replicas import Replicas
from laboratory.tasks import table
from laboratory.tasks.table import TASKS
from laboratory.tasks.task import Job, Settings, Task, clip, momentum_of, optimizer_of, rate_of
from laboratory.timing import threads

if TYPE_CHECKING:
    from laboratory.harness.measured import Training


@threads(1)
def train(own: Training, folder: Path) -> dict[str, Any]:
    """Train on one thread. What the ranks come to is checked to be equal to the last bit in every step."""
    began, task, settings = time.perf_counter(), TASKS[own.task], own.settings
    arrays = table.load(table.place(folder, own.data) if own.data else None)
    job = task.make(settings, own.seed, own.ranks, arrays)
    if (local := ways.local_of(own.way)) is not None:
        losses, sent = local_steps.train(job, task, settings, own.ranks, own.seed, local)
        return _figures(job, settings, losses, sent, began, None)
    exchange = (Updates if ways.acts_on_updates(own.way) else Gradients)(own, job, task)
    parameters = [*job.model.parameters()]
    losses, sent = [], []
    warned_at = None
    for step in range(1, settings.steps + 1):
        for optimizer in exchange.optimizers:
            optimizer.param_groups[0]["lr"] = rate_of(task, settings, step)
        loss, grads = 0.0, []
        for x, y in map(next, job.batches):
            of_rank = job.loss(job.model(x), y)
            loss += float(of_rank.detach()) / own.ranks
            grads.append(torch.autograd.grad(of_rank, parameters))
            clip(grads[-1], settings.clip)
        losses.append(round(loss, 6))
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            exchange.step(grads)
        warned_at = step if seen and warned_at is None else warned_at
        sent.append(max(exchange.bytes_sent))
    exchange.close()
    return _figures(job, settings, losses, sent, began, warned_at)


class Gradients:
    """Simulated ranks that exchange gradients. All share the weights and an optimizer."""

    def __init__(self, own: Training, job: Job, task: Task):
        self._named = dict(job.model.named_parameters())
        optimizer = optimizer_of(task, own.settings, job.model, momentum_of(own.way))
        shapes = {name: tuple(each.shape) for name, each in self._named.items()}
        known: Any = {"optimizer": optimizer, "named_parameters": list(self._named.items())}
        self._simulation = gradcomp.Simulation(own.way, shapes, own.ranks, own.seed, **known)
        self.optimizers = [optimizer]

    @property
    def bytes_sent(self) -> list[int]:
        """The bytes that each rank sent in the last step."""
        return self._simulation.bytes_sent

    def step(self, grads: Sequence[tuple[Tensor, ...]]) -> None:
        """Exchange all ranks' gradients, and step."""
        for name, update in self._simulation.step([dict(zip(self._named, each, strict=True)) for each in grads]).items():
            self._named[name].grad = update
        self.optimizers[0].step()
        self.optimizers[0].zero_grad()

    def close(self) -> None:
        """End. Nothing is left to do."""


class Updates(Replicas):
    """Simulated ranks that exchange updates. Each has weights and an optimizer of its own."""

    def __init__(self, own: Training, job: Job, task: Task):
        super().__init__(own.way, job.model, own.ranks, own.seed, partial(optimizer_of, task, own.settings))


def _figures(
    job: Job, settings: Settings, losses: list[float], sent: list[int], began: float, warned_at: int | None
) -> dict[str, Any]:
    seconds = round(time.perf_counter() - began, 2)
    return {
        "losses": losses,
        "sent": sent,
        "scores": [(settings.steps, seconds, job.score())],
        "parameters": sum(each.numel() for each in job.model.parameters()),
        "seconds": seconds,
        "warned_at": warned_at,
    }
