"""A training with simulated ranks in one process."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import gradcomp
from laboratory.harness import local_steps
from laboratory.harness.ways import local_of
from laboratory.tasks import table
from laboratory.tasks.table import TASKS
from laboratory.tasks.task import TUNED_RATE, Job, Settings, Task, clip, momentum_of, optimizer_of, rate_of
from laboratory.timing import threads

if TYPE_CHECKING:
    from laboratory.harness.measured import Training


@threads(1)
def train(own: Training, folder: Path) -> dict[str, Any]:
    """Train on one thread. All ranks share the weights: the simulation checks that their updates are equal to the last bit."""
    began, task, settings = time.perf_counter(), TASKS[own.task], own.settings
    arrays = table.load(table.place(folder, own.data) if own.data else None)
    job = task.make(settings, own.seed, own.ranks, arrays)
    if (local := local_of(own.way)) is not None:
        losses, sent = local_steps.train(job, task, settings, own.ranks, own.seed, local)
        return _figures(job, task, settings, losses, sent, began, None)
    named = dict(job.model.named_parameters())
    optimizer = optimizer_of(task, settings, job.model, momentum_of(own.way))
    shapes = {name: tuple(each.shape) for name, each in named.items()}
    known: Any = {"optimizer": optimizer, "named_parameters": list(named.items())}
    simulation = gradcomp.Simulation(own.way, shapes, own.ranks, own.seed, **known)
    losses, sent = [], []
    warned_at = None
    for step in range(1, settings.steps + 1):
        optimizer.param_groups[0]["lr"] = rate_of(task, settings, step)
        loss, grads = 0.0, []
        for x, y in map(next, job.batches):
            of_rank = job.loss(job.model(x), y)
            loss += float(of_rank.detach()) / own.ranks
            grads.append(torch.autograd.grad(of_rank, [*named.values()]))
            clip(grads[-1], settings.clip)
        losses.append(round(loss, 6))
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            updates = simulation.step([dict(zip(named, each, strict=True)) for each in grads])
        warned_at = step if seen and warned_at is None else warned_at
        for name, update in updates.items():
            named[name].grad = update
        optimizer.step()
        optimizer.zero_grad()
        sent.append(max(simulation.bytes_sent))
    return _figures(job, task, settings, losses, sent, began, warned_at)


def _tune(job: Job, task: Task, settings: Settings) -> None:
    """Fine-tune the trained model, by one process and without compression."""
    own = settings._replace(lr=TUNED_RATE * settings.lr, steps=settings.tuned)
    optimizer, (batches,) = optimizer_of(task, own, job.model, fused=True), job.batches
    for step in range(1, own.steps + 1):
        optimizer.param_groups[0]["lr"] = rate_of(task, own, step)
        optimizer.zero_grad()
        x, y = next(batches)
        job.loss(job.model(x), y).backward()
        clip(tuple(each.grad for each in job.model.parameters() if each.grad is not None), own.clip)
        optimizer.step()


def _figures(
    job: Job, task: Task, settings: Settings, losses: list[float], sent: list[int], began: float, warned_at: int | None
) -> dict[str, Any]:
    seconds = round(time.perf_counter() - began, 2)
    scores = [(settings.steps, seconds, job.score())]
    if job.second is not None:
        _tune(job.second, task, settings)
        scores.append((settings.steps + settings.tuned, round(time.perf_counter() - began, 2), job.second.score()))
    return {
        "losses": losses,
        "sent": sent,
        "scores": scores,
        "parameters": sum(each.numel() for each in job.model.parameters()),
        "seconds": seconds,
        "warned_at": warned_at,
    }
