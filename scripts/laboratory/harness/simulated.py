"""A training with simulated ranks in one process, with the squares of what each step's exchange leaves behind."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import gradcomp
from gradcomp.core.compressor import Acc, Compressor, Steps
from gradcomp.core.requests import World
from gradcomp.core.wrapper import Wrapper
from gradcomp.engine.stages.feedback import Feedback
from gradcomp.native import kernels
from laboratory.tasks import prepared, training
from laboratory.tasks.table import TASKS
from laboratory.tasks.task import Job, Settings

if TYPE_CHECKING:
    from laboratory.harness.measured import Training

# One step of so many is looked at: it takes two passes over every rank's residual.
STEP_INTERVAL = 10


@dataclass(eq=False)  # the compressor that holds it is hashed
class Squares:
    """Sums over ranks and entries, for each step that is looked at: of the residual before its exchange, and after it.

    A compressor takes what it sends out of the residual, with error feedback or without. The rest is this training's own error.
    """

    meant: list[float] = field(default_factory=list)
    left: list[float] = field(default_factory=list)
    looking: bool = False

    def begin(self, step: int) -> None:
        """Note that a step begins, counted from 1."""
        self.looking = (step - 1) % STEP_INTERVAL == 0
        if self.looking:
            self.meant.append(0.0)
            self.left.append(0.0)

    def add(self, sums: list[float], residual: Tensor) -> None:
        """Add the square of one rank's bucket."""
        if self.looking:
            found = torch.empty(1, dtype=torch.float64)
            kernels.sum_squares([residual], found)
            sums[-1] += float(found)


@dataclass(frozen=True)
class Watched(Wrapper):
    """A compressor whose residual is looked at before and after its exchange. It has no state of its own."""

    squares: Squares

    def inner_state(self, state: Any) -> Any:
        return state

    def exchange(self, acc: Acc, state: Any, world: World) -> Steps:
        self.squares.add(self.squares.meant, acc.residual)
        update = yield from self.inner.exchange(acc, state, world)
        self.squares.add(self.squares.left, acc.residual)
        return update


def watched(spec: str, squares: Squares) -> Compressor:
    """Make a spec's compressor with its squares counted, inside its error feedback."""
    made = gradcomp.make(spec)
    return replace(made, inner=Watched(made.inner, squares)) if isinstance(made, Feedback) else Watched(made, squares)


def job_of(own: Training, folder: Path) -> Job:
    """Make the model and the batches, of all ranks."""
    arrays = prepared.load(prepared.place(folder, own.data)) if own.data else {}
    return TASKS[own.task].make(own.settings, own.seed, own.ranks, arrays)


def train(own: Training, folder: Path) -> dict[str, Any]:
    """Train. All ranks share the weights: the simulation checks that their updates are equal to the last bit."""
    began, task, settings = time.perf_counter(), TASKS[own.task], own.settings
    job, squares = job_of(own, folder), Squares()
    named = dict(job.model.named_parameters())
    optimizer = training.optimizer_of(task, settings, job.model, training.momentum_of(own.way))
    shapes = {name: tuple(each.shape) for name, each in named.items()}
    compressor = watched(own.way, squares)
    simulation = gradcomp.Simulation(
        compressor, shapes, own.ranks, own.seed, optimizer=optimizer, named_parameters=list(named.items())
    )
    losses: list[float] = []
    sent: list[int] = []
    for step in range(1, settings.steps + 1):
        squares.begin(step)
        optimizer.param_groups[0]["lr"] = training.rate_of(task, settings, step)
        own_losses, grads = zip(*gradients(job, list(named.values()), settings), strict=True)
        losses.append(round(sum(loss / own.ranks for loss in own_losses), 6))
        for name, update in simulation.step([dict(zip(named, each, strict=True)) for each in grads]).items():
            named[name].grad = update
        optimizer.step()
        optimizer.zero_grad()
        sent.append(max(simulation.bytes_sent))
    seconds = round(time.perf_counter() - began, 2)
    return {
        "losses": losses,
        "sent": sent,
        "squares": {"meant": squares.meant, "left": squares.left},
        "scores": [(settings.steps, seconds, job.score())],
        "parameters": sum(each.numel() for each in named.values()),
        "seconds": seconds,
    }


def gradients(job: Job, parameters: list[Tensor], settings: Settings) -> Iterator[tuple[float, tuple[Tensor, ...]]]:
    """Yield each rank's loss and gradient, which is clipped if the settings say so."""
    for batches in job.batches:
        x, y = next(batches)
        loss = job.loss(job.model(x), y)
        grads = torch.autograd.grad(loss, parameters)
        clip(grads, settings.clip)
        yield float(loss.detach()), grads


def clip(grads: tuple[Tensor, ...], longest: float) -> None:
    """Shorten a rank's gradient to this length where it is longer. 0 leaves every gradient alone."""
    if longest:
        length = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads]))
        for grad in grads:
            grad.mul_((longest / length).clamp(max=1))
