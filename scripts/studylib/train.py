"""One run of a study: trains a task with simulated ranks whose gradients a spec compresses, and records what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import gradcomp
from studylib.errors import Errors
from studylib.tasks import TASKS, Job, Settings

WARM_UP = 0.05  # the share of the steps in which the learning rate rises from nothing
DECAY_FROM, DECAY_TO = 0.6, 0.1  # from this share on it falls, in a straight line, to this part of itself

Record = dict[str, Any]
Grads = dict[str, Tensor]


def rate_at(step: int, steps: int) -> float:
    """The part of the learning rate that step number `step`, from 1, is made with."""
    rising = min(1.0, step / max(1.0, WARM_UP * steps))
    left = max(0.0, (step / steps - DECAY_FROM) / (1 - DECAY_FROM))
    return rising * (1 - (1 - DECAY_TO) * left)


def keeps_momentum(spec: str) -> bool:
    """Whether the spec has momentum of its own; the optimizer's must then be 0."""
    return gradcomp.make(spec).traits.momentum > 0


def run(task: str, spec: str, seed: int, ranks: int, settings: Settings) -> Record:
    """Trains once. Weights are common to all ranks, whose updates the simulation holds equal to the last bit."""
    began = time.perf_counter()
    job = TASKS[task].make(settings, seed, ranks)
    sizes = {name: p.shape for name, p in job.model.named_parameters()}
    simulation = gradcomp.Simulation(spec, sizes, ranks, seed)
    errors = Errors(simulation)

    def exchange(step: int, grads: list[Grads]) -> Grads:
        errors.begin(step)
        return simulation.step(grads)

    losses: list[float] = []
    sent: list[int] = []
    for loss in descend(job, settings, 0.0 if keeps_momentum(spec) else settings.momentum, exchange):
        losses.append(round(loss, 6))
        sent.append(max(simulation.bytes_sent))
    parameters = sum(size.numel() for size in sizes.values())
    return {
        "losses": losses,
        "sent": sent,
        "squares": errors.squares(),
        "dense_bytes": 4 * parameters * settings.steps,
        "score": job.score(),
        "parameters": parameters,
        "seconds": round(time.perf_counter() - began, 2),
    }


def descend(job: Job, settings: Settings, momentum: float, exchange: Callable[[int, list[Grads]], Grads]) -> Iterator[float]:
    """Trains step by step, and says each step's mean loss; exchange() is given the step, from 1, and all ranks' gradients."""
    parameters = dict(job.model.named_parameters())
    optimizer = torch.optim.SGD(parameters.values(), lr=settings.lr, momentum=momentum)
    for step in range(1, settings.steps + 1):
        optimizer.param_groups[0]["lr"] = settings.lr * rate_at(step, settings.steps)
        grads: list[Grads] = []
        loss = 0.0
        for batches in job.batches:
            x, y = next(batches)
            own = job.loss(job.model(x), y)
            loss += float(own.detach()) / len(job.batches)
            found = _clipped(torch.autograd.grad(own, list(parameters.values())), settings.clip)
            grads.append(dict(zip(parameters, found, strict=True)))
        for name, update in exchange(step, grads).items():
            parameters[name].grad = update
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def _clipped(grads: tuple[Tensor, ...], longest: float) -> tuple[Tensor, ...]:
    """A rank's gradient, shortened to this length where it is longer; 0 leaves every gradient alone."""
    if longest:
        length = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads]))
        for grad in grads:
            grad.mul_((longest / length).clamp(max=1))
    return grads
