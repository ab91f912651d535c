"""Training with simulated ranks: the loop over the steps, optimizers, learning rates, and a view of every exchange."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import gradcomp
from gradcomp.core.compressor import Acc, Compressor, Steps
from gradcomp.core.requests import World
from gradcomp.core.wrapper import Wrapper
from gradcomp.engine.buckets.collector import Collector
from laboratory.tasks.task import Job, Settings, Task

# The share of the steps after which a linear schedule falls, and the part of the learning rate that is left at the end.
DECAY_FROM, DECAY_TO = 0.6, 0.1

# The part of the learning rate that a cosine schedule leaves at the end.
COSINE_TO = 0.01

Grads = dict[str, Tensor]


def linear_rate(step: int, steps: int, warmup: float) -> float:
    """Return the part of the learning rate that applies in a step, counted from 1: it rises, stays, and falls linearly."""
    rising = min(1.0, step / max(1.0, warmup * steps))
    left = max(0.0, (step / steps - DECAY_FROM) / (1 - DECAY_FROM))
    return rising * (1 - (1 - DECAY_TO) * left)


def cosine_rate(step: int, steps: int, warmup: float) -> float:
    """Return the part of the learning rate that applies in a step, counted from 1: it rises, then falls by half a cosine."""
    rising = max(1.0, warmup * steps)
    if step <= rising:
        return step / rising
    return COSINE_TO + (1 - COSINE_TO) * (1 + math.cos(math.pi * (step - rising) / (steps - rising))) / 2


RATES = {"linear": linear_rate, "cosine": cosine_rate}


def rate_of(task: Task, settings: Settings, step: int) -> float:
    """Return the learning rate of a step, counted from 1."""
    return settings.lr * RATES[task.schedule](step, settings.steps, settings.warmup)


def optimizer_of(task: Task, settings: Settings, model: nn.Module, kept: float = 0.0) -> torch.optim.Optimizer:
    """Make a task's optimizer. kept: the momentum that the spec keeps; SGD has none beside it.

    A momentum repeats the gradient of each step, 1 / (1 - momentum) times in all, and SGD's repeats the weight decay as well. A
    spec's momentum does not see the weight decay, which is made larger by this factor instead. AdamW decays weights directly.
    """
    decay = settings.weight_decay
    if task.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), settings.lr, (settings.momentum, settings.beta2), weight_decay=decay)
    momentum = 0.0 if kept else settings.momentum
    return torch.optim.SGD(model.parameters(), settings.lr, momentum, weight_decay=decay / (1 - kept))


def keeps_momentum(spec: str) -> bool:
    """Check whether the spec keeps a momentum; the optimizer's must then be 0."""
    return momentum_of(spec) > 0


def momentum_of(spec: str) -> float:
    """Return the momentum that the spec keeps itself."""
    return gradcomp.make(spec).traits.momentum


@dataclass(frozen=True)
class Watched(Wrapper):
    """A compressor under observation. It has no state of its own."""

    observer: Observer

    def inner_state(self, state: Any) -> Any:
        return state

    def exchange(self, acc: Acc, state: Any, world: World) -> Steps:
        self.observer.before(acc, state, world)
        update = yield from self.inner.exchange(acc, state, world)
        self.observer.after(acc, state, world)
        return update


class Observer(Protocol):
    """Something that looks at every bucket's exchange on every simulated rank."""

    def before(self, acc: Acc, state: Any, world: World) -> None:
        """Look at the acc before the compressor takes from it."""

    def after(self, acc: Acc, state: Any, world: World) -> None:
        """Look at what is left."""


def watched(spec: str, observer: Observer) -> Compressor:
    """Make a spec's compressor under observation, inside its error feedback."""
    made = gradcomp.make(spec)
    return replace(made, inner=Watched(made.inner, observer)) if isinstance(made, Collector) else Watched(made, observer)


def descend(
    task: Task,
    settings: Settings,
    job: Job,
    optimizer: torch.optim.Optimizer,
    exchange: Callable[[int, list[Grads]], Grads],
) -> Iterator[float]:
    """Train, and yield each step's mean loss. exchange() gets the step, counted from 1, and all ranks' gradients."""
    parameters = dict(job.model.named_parameters())
    for step in range(1, settings.steps + 1):
        optimizer.param_groups[0]["lr"] = rate_of(task, settings, step)
        grads: list[Grads] = []
        loss = 0.0
        for batches in job.batches:
            x, y = next(batches)
            own = job.loss(job.model(x), y)
            loss += float(own.detach()) / len(job.batches)
            clipped = _clipped(torch.autograd.grad(own, list(parameters.values())), settings.clip)
            grads.append(dict(zip(parameters, clipped, strict=True)))
        for name, update in exchange(step, grads).items():
            parameters[name].grad = update
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def _clipped(grads: tuple[Tensor, ...], longest: float) -> tuple[Tensor, ...]:
    """Shorten a rank's gradient to this length where it is longer. 0 leaves every gradient alone."""
    if longest:
        length = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads]))
        for grad in grads:
            grad.mul_((longest / length).clamp(max=1))
    return grads
