"""The optimizer and the learning rates of a task, with the momentum that a spec keeps in the optimizer's place."""

from __future__ import annotations

import math

import torch
from torch import nn

import gradcomp
from laboratory.tasks.task import Settings, Task

# The share of the steps after which a linear schedule falls, and the part of the learning rate that is left at the end.
DECAY_FROM, DECAY_TO = 0.6, 0.1

# The part of the learning rate that a cosine schedule leaves at the end.
COSINE_TO = 0.01


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


def momentum_of(spec: str) -> float:
    """Return the momentum that the spec keeps itself."""
    return gradcomp.make(spec).traits.momentum
