"""A training on simulated ranks that measurements look into, step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from studylib import train
from studylib.tasks import TASKS
from studylib.train import Grads
from torch import Tensor

import gradcomp

TASK = "resnet"

See = Callable[[gradcomp.Simulation, list[Grads]], Grads]


def walk(spec: str, steps: int, seed: int, ranks: int, see: See) -> Iterator[float]:
    """Trains, and says each step's loss. see() makes the exchange, and what it likes of it."""
    settings = TASKS[TASK].defaults._replace(steps=steps)
    job = TASKS[TASK].make(settings, seed, ranks)
    simulation = gradcomp.Simulation(spec, {name: p.shape for name, p in job.model.named_parameters()}, ranks, seed)
    return train.descend(job, settings, settings.momentum, lambda step, grads: see(simulation, grads))


def accumulated(simulation: gradcomp.Simulation, grads: list[Grads]) -> tuple[Tensor, slice]:
    """What every rank would compress in this step, [ranks, entries], and which of it travels as codes."""
    (bucket,) = simulation._reducers[0].buckets
    waiting = torch.stack([reducer.buckets[0].state.residual for reducer in simulation._reducers])
    come = torch.stack([torch.cat([own[name].flatten() for name in bucket.layout.names]) for own in grads])
    middle: slice = bucket.state.inner.middle
    return waiting + come, middle
