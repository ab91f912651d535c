"""Training with simulated ranks: the loop over the steps, the learning rate, and a view of every exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

import gradcomp
from gradcomp.engine.collector import Collector
from gradcomp.engine.wrapper import Wrapper
from gradcomp.protocol import Acc, Compressor, Steps
from gradcomp.requests import World
from laboratory.tasks.table import Job, Settings

# The share of the steps in which the learning rate rises from 0.
WARM_UP = 0.05

# The share of the steps after which the learning rate falls linearly, and the part of it that is left at the end.
DECAY_FROM, DECAY_TO = 0.6, 0.1

Grads = dict[str, Tensor]


def rate_at(step: int, steps: int) -> float:
    """Return the part of the learning rate that applies in a step, counted from 1."""
    rising = min(1.0, step / max(1.0, WARM_UP * steps))
    left = max(0.0, (step / steps - DECAY_FROM) / (1 - DECAY_FROM))
    return rising * (1 - (1 - DECAY_TO) * left)


def keeps_momentum(spec: str) -> bool:
    """Check whether the spec keeps a momentum; the optimizer's must then be 0."""
    return gradcomp.make(spec).traits.momentum > 0


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


def descend(job: Job, settings: Settings, momentum: float, exchange: Callable[[int, list[Grads]], Grads]) -> Iterator[float]:
    """Train, and yield each step's mean loss. exchange() gets the step, counted from 1, and all ranks' gradients."""
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
