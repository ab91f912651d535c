"""A trainee: one way's model, optimizer and batches on one real rank; and the door that it trains behind."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from laboratory.harness.ways import passes
from laboratory.tasks.task import Batch


class Fitted(NamedTuple):
    """A model and an optimizer that exchange gradients in some way.

    bytes_sent: by this rank in the last step; None if unknown. stats: gradcomp's, if it is at work.
    """

    model: nn.Module
    optimizer: Any
    bytes_sent: Callable[[], int | None]
    stats: Callable[[], Mapping[str, Any]] = dict


class Door(Protocol):
    """The ranks behind a door, and what fits a way to a model."""

    rank: int
    size: int

    def means(self, own: list[float], name: str) -> list[float]:
        """Return the means of figures over the ranks."""

    def fit(self, way: str, model: nn.Module, optimizer: Any, seed: int, clip: float) -> Fitted:
        """Fit a way to a model and its optimizer. clip: the longest gradient of a rank, if the way can clip; 0: any length."""

    def end(self) -> None:
        """Leave the ranks, when all of them are done."""


class Trainee:
    """One way's training on this rank. loss: of the last step, of this rank. passes: the batches of a step."""

    def __init__(self, way: str, fitted: Fitted, batches: Iterator[Batch], loss_of: Callable[[Tensor, Tensor], Tensor]):
        self.way, self.fitted, self.passes = way, fitted, passes(way)
        self._batches, self._loss_of = batches, loss_of
        self.loss = 0.0

    def step(self) -> float:
        """Train a step. Return its seconds, without those that make the batches."""
        batches = [next(self._batches) for _ in range(self.passes)]
        began = time.perf_counter()
        self.fitted.optimizer.zero_grad()
        self.loss = sum(self._pass(x, y, left) for left, (x, y) in zip(reversed(range(self.passes)), batches, strict=True))
        self.fitted.optimizer.step()
        return time.perf_counter() - began

    def rest(self) -> None:
        """Leave the gradients' memory to the next trainee."""
        self.fitted.optimizer.zero_grad()

    def _pass(self, x: Tensor, y: Tensor, left: int) -> float:
        """Run a batch's forward and backward. left: batches of the step after this one."""
        model: Any = self.fitted.model
        with model.no_sync() if left else contextlib.nullcontext():
            loss = self._loss_of(model(x), y) / self.passes
            loss.backward()
        return float(loss.detach())
