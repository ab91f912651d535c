"""A trainee: one way's model, optimizer and batches on one rank."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from gradcomp.networks import Network
from laboratory.tasks.task import Batch
from laboratory.train.ways import passes


class Fitted(NamedTuple):
    """A model and an optimizer that exchange gradients in some way.

    bytes_sent: by this rank in the last step; None where nothing counts them. stats: gradcomp's, if it is at work.
    """

    model: nn.Module
    optimizer: Any
    bytes_sent: Callable[[], int | None]
    stats: Callable[[], Mapping[str, Any]] = dict


class Door(Protocol):
    """The ranks behind a door, and what fits a way to a model."""

    name: str
    rank: int
    size: int

    def means(self, own: list[float], name: str) -> list[float]:
        """Return the means of figures over the ranks."""

    def network(self) -> Network:
        """Return the network that gradcomp has."""

    def fit(self, way: str, model: nn.Module, optimizer: Any, seed: int) -> Fitted:
        """Fit a way to a model and its optimizer."""

    def end(self) -> None:
        """Leave the ranks, when all of them are done."""


class Trainee:
    """One way's training on this rank. loss: of the last step, of this rank."""

    def __init__(self, way: str, fitted: Fitted, batches: Iterator[Batch], loss_of: Callable[[Tensor, Tensor], Tensor]):
        self.way, self.fitted = way, fitted
        self._batches, self._loss_of, self._passes = batches, loss_of, passes(way)
        self.loss = 0.0

    @property
    def passes(self) -> int:
        """The batches of a step."""
        return self._passes

    def step(self) -> float:
        """Train a step. Return its seconds, without those that make the batches."""
        batches = [next(self._batches) for _ in range(self._passes)]
        began = time.perf_counter()
        self.fitted.optimizer.zero_grad()
        self.loss = sum(self._pass(x, y, left) for left, (x, y) in zip(reversed(range(self._passes)), batches, strict=True))
        self.fitted.optimizer.step()
        return time.perf_counter() - began

    def _pass(self, x: Tensor, y: Tensor, left: int) -> float:
        """Run a batch's forward and backward. left: batches of the step after this one."""
        model: Any = self.fitted.model
        with model.no_sync() if left else contextlib.nullcontext():
            loss = self._loss_of(model(x), y) / self._passes
            loss.backward()
        return float(loss.detach())

    def rest(self) -> None:
        """Leave the gradients' memory to the next trainee."""
        self.fitted.optimizer.zero_grad()
