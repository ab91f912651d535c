"""Trainings with simulated ranks on a GPU, one after another until their time is over: a task's, by the studies' own exchanges.

A rank's passes are a CUDA graph there: launches would take longer than the kernels. All ranks are the work of one thread at a
time, on one stream.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from laboratory.gpu.stages import Record, attempt
from laboratory.harness import simulated
from laboratory.harness.measured import Training
from laboratory.tasks.task import Arrays, Task

# Passes before a graph is captured.
WARM = 3


class Captured(simulated.Plain):
    """Passes in bfloat16 by autocast. On a GPU the first one is captured, and the others replay it in its memory."""

    _graph: Any = None

    def __call__(self, x: Tensor, y: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the loss and the gradients of a batch."""
        if not x.is_cuda:
            return self._run(x, y)
        if self._graph is None:
            self._x, self._y = x.clone(), y.clone()
            self._graph = self._capture()
        self._x.copy_(x)
        self._y.copy_(y)
        self._graph.replay()
        loss, grads = self._found
        return loss.clone(), [each.clone() for each in grads]

    def _run(self, x: Tensor, y: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        with torch.autocast(x.device.type, torch.bfloat16, cache_enabled=False):
            return super().__call__(x, y)

    def _capture(self) -> torch.cuda.CUDAGraph:
        kept = {name: value.clone() for name, value in self.model.state_dict().items()}
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM):
                self._run(self._x, self._y)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._found = self._run(self._x, self._y)
        self.model.load_state_dict(kept)  # running means have seen a batch
        return graph


def train(own: Training, task: Task, arrays: Arrays) -> Record:
    """Train on the device of the arrays. Return the score, the compression, and the seconds of the steps."""
    gc.collect()  # what the last training left: freed while a graph is captured, pinned memory may spoil it
    job = task.make(own.settings, own.seed, own.ranks, arrays)
    job.model.to(next(iter(arrays.values())).device)
    found = simulated.trained(own, task, job, Captured)
    ((steps, seconds, score),) = found["scores"]
    dense = 4 * found["parameters"] * steps
    return {
        task.score_name.split()[0]: round(score, 3),
        "compression": round(dense / sum(found["sent"]), 1),
        "steps": steps,
        "seconds": seconds,
    }


def in_turn(
    found: Record, trainings: Sequence[tuple[Record, Callable[[], Record]]], kind: str, end: float, out: Path | None
) -> None:
    """Train one after another, and write the record after each. What would not end in time is left out.

    trainings: what is known of each, and the function that trains. A training takes as long as the last one that is alike in
    `kind`; as the longest so far, if there is none. end: of time.monotonic().
    """
    took = dict[Any, float]()
    for known, run in trainings:
        began, alike = time.monotonic(), known[kind]
        fits = began + took.get(alike, max(took.values(), default=0.0)) < end
        attempt(found, "trainings", known, run if fits else left_out, out)
        if fits:
            took[alike] = time.monotonic() - began


def left_out() -> Record:
    """Say why a training has no figures."""
    return {"left_out": "no time was left"}
