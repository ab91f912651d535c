"""A training with simulated ranks in one process."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import gradcomp
from laboratory.harness import ways
from laboratory.harness.replicas import Replicas
from laboratory.tasks import table
from laboratory.tasks.table import TASKS
from laboratory.tasks.task import Job, Task, clip, momentum_of, optimizer_of, rate_of
from laboratory.timing import threads

if TYPE_CHECKING:
    from laboratory.harness.measured import Training


@threads(1)
def train(own: Training, folder: Path) -> dict[str, Any]:
    """Train on one thread. What the ranks come to is checked to be equal to the last bit in every step."""
    began, task, settings = time.perf_counter(), TASKS[own.task], own.settings
    job = task.make(settings, own.seed, own.ranks, table.load(table.place(folder, own.data) if own.data else None))
    kind = Local if ways.local_of(own.way) else Updates if ways.acts_on_updates(own.way) else Gradients
    exchange = kind(own, job, task)
    losses, sent = [], []
    warned_at = None
    for step in range(1, settings.steps + 1):
        for optimizer in exchange.optimizers:
            optimizer.param_groups[0]["lr"] = rate_of(task, settings, step)
        loss, grads = 0.0, []
        for model, (x, y) in zip(exchange.models, map(next, job.batches), strict=True):
            of_rank = job.loss(model(x), y)
            loss += float(of_rank.detach()) / own.ranks
            grads.append(torch.autograd.grad(of_rank, [*model.parameters()]))
            clip(grads[-1], settings.clip)
        losses.append(round(loss, 6))
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            exchange.step(grads)
        warned_at = step if seen and warned_at is None else warned_at
        sent.append(max(exchange.bytes_sent))
    exchange.close()
    seconds = round(time.perf_counter() - began, 2)
    return {
        "losses": losses,
        "sent": sent,
        "scores": [(settings.steps, seconds, job.score())],
        "parameters": sum(each.numel() for each in job.model.parameters()),
        "seconds": seconds,
        "warned_at": warned_at,
    }


class Gradients:
    """Simulated ranks that exchange gradients. All share the weights and an optimizer. models: by rank."""

    def __init__(self, own: Training, job: Job, task: Task):
        self._named = dict(job.model.named_parameters())
        optimizer = optimizer_of(task, own.settings, job.model, momentum_of(own.way))
        shapes = {name: tuple(each.shape) for name, each in self._named.items()}
        known: Any = {"optimizer": optimizer, "named_parameters": list(self._named.items())}
        self._simulation = gradcomp.Simulation(own.way, shapes, own.ranks, own.seed, **known)
        self.optimizers, self.models = [optimizer], [job.model] * own.ranks

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
        self.models = [job.model] * own.ranks  # all weights are equal, and a batch norm sees all batches


class Local:
    """Simulated ranks that take local steps, each with weights of its own. In the end the job's model has the common ones."""

    def __init__(self, own: Training, job: Job, task: Task):
        way = ways.local_of(own.way)
        assert way is not None
        self._every, self._steps, self._left, self._job = way.every, 0, own.settings.steps, job
        self.models = [copy.deepcopy(job.model) for _ in range(own.ranks)]
        # One for all ranks, since it moves each entry by itself.
        self.optimizers = [optimizer_of(task, own.settings, nn.ModuleList(self.models), fused=True)]
        self._starts = {name: each.detach().clone() for name, each in job.model.named_parameters()}
        self._outer = torch.optim.SGD(self._starts.values(), way.rate, way.momentum, nesterov=way.momentum > 0)
        shapes = {name: tuple(each.shape) for name, each in self._starts.items()}
        self._simulation = gradcomp.Simulation(way.spec, shapes, own.ranks, own.seed)
        self.bytes_sent = [0] * own.ranks

    @torch.no_grad()
    def step(self, grads: Sequence[tuple[Tensor, ...]]) -> None:
        """Step on all ranks; at every H-th step and the last one, exchange their progress, and go on from the new start."""
        for model, own in zip(self.models, grads, strict=True):
            for parameter, grad in zip(model.parameters(), own, strict=True):
                parameter.grad = grad
        self.optimizers[0].step()
        self._steps += 1
        self.bytes_sent = [0] * len(self.models)
        if self._steps % self._every and self._steps != self._left:
            return
        progress = [{name: self._starts[name] - each for name, each in model.named_parameters()} for model in self.models]
        for name, mean in self._simulation.step(progress).items():
            self._starts[name].grad = mean.clone()
        self._outer.step()
        buffers = [dict(model.named_buffers()) for model in self.models]
        means = {
            name: torch.stack([each[name] for each in buffers]).mean(0)
            for name, first in buffers[0].items()
            if first.is_floating_point()
        }
        for model in self.models:
            model.load_state_dict({**self._starts, **means}, strict=False)
        self.bytes_sent = self._simulation.bytes_sent

    def close(self) -> None:
        """Leave the common weights in the job's model."""
        self._job.model.load_state_dict(self.models[0].state_dict())
