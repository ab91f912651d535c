"""Sessions of several ranks in one process, a thread for each, for tests of meetings and commits."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from gradcomp.core.requests import Reduce, Request, World
from gradcomp.engine.phases import Door
from gradcomp.engine.reducer import Options
from gradcomp.engine.session import Session
from gradcomp.engine.slots import Parameters
from gradcomp.networks import Answer
from gradcomp.networks.memory import Round
from gradcomp.spec import make

SHAPE = (40, 30)
# Seconds in which all ranks must have made a request.
PATIENCE = 20


class Generation:
    """A network of some ranks, until it is initialised anew."""

    def __init__(self, ranks: int):
        self.ranks = ranks
        self.changed = threading.Condition()
        self.rounds: dict[tuple[str, int], Round] = {}
        self.began: dict[tuple[str, int], list[float]] = {}  # by the ranks' clocks


class ThreadNetwork:
    """One rank's network. move() initialises it anew."""

    def __init__(self, generation: Generation, rank: int, host: str):
        self.device, self.host, self.meeting, self.ready = torch.device("cpu"), host, "", True
        self.move(generation, rank)

    def move(self, generation: Generation, rank: int) -> None:
        """Join a generation of the network."""
        self.generation, self._rank = generation, rank
        self.hosts: tuple[int, ...] | None = None
        self.made: dict[str, int] = {}

    @property
    def world(self) -> World:
        return World(self._rank, self.generation.ranks, self.hosts)

    def prepare(self) -> None:
        return

    def failure(self, text: str) -> Exception:
        return RuntimeError(text)

    def start(self, request: Request, name: str) -> Answer:
        if isinstance(request, Reduce):  # the tensor may be used again while another rank still reads it
            request = Reduce(request.tensor.clone(), request.scale)
        generation, number = self.generation, self.made.get(name, 0)
        self.made[name] = number + 1
        with generation.changed:
            its = generation.rounds.setdefault((name, number), Round(name, generation.ranks))
            its.post(self._rank, request)
            generation.changed.notify_all()

        def answer() -> Any:
            with generation.changed:
                if not generation.changed.wait_for(lambda: its.missing == 0, PATIENCE):
                    raise TimeoutError(name)
                reply = its.reply(self._rank)
                return reply.clone() if isinstance(reply, Tensor) else reply

        return answer


class Rank:
    """One rank: a session of one layer, and the sums of its gradients and its updates.

    optimizer_of: makes its optimizer, whose rate is 1, so that the weights tell of the updates.
    """

    def __init__(self, generation: Generation, rank: int, spec: str, host: str = "", optimizer_of: Any = None):
        self.seconds = 0.0  # of its clock
        self.parameter = torch.nn.Parameter(torch.zeros(SHAPE))
        self.network = ThreadNetwork(generation, rank, host or f"host {rank}")
        self.optimizer = optimizer_of and optimizer_of([self.parameter])
        network: Any = self.network
        self.session = Session(
            make(spec), Parameters([("w", self.parameter)]), network, Options(), Door(has_optimizers=self.optimizer is not None)
        )
        self._draws = torch.Generator().manual_seed(rank + 100 * generation.ranks)
        self.given, self.came = torch.zeros(SHAPE, dtype=torch.float64), torch.zeros(SHAPE, dtype=torch.float64)

    def step(self, scale: float = 1.0) -> Tensor:
        """Exchange a drawn gradient, step with the optimizer if there is one, and return the update."""
        update = self.exchange(scale)
        if self.optimizer is not None:
            self.optimizer.step()
            self.came = -self.parameter.detach().double()
        return update

    def exchange(self, scale: float = 1.0) -> Tensor:
        """Exchange a drawn gradient, and return the update."""
        self.parameter.grad = torch.randn(SHAPE, generator=self._draws)
        self.given += self.parameter.grad
        self.session.gradients.ready(self.session.slot(self.parameter))
        self.session.gradients.finish(scale)
        self.came += self.parameter.grad
        return self.parameter.grad

    def idle(self) -> None:
        """Take a step without a gradient."""
        self.parameter.grad = None
        self.session.gradients.begin()
        self.session.gradients.finish()
        if self.optimizer is not None:
            self.optimizer.step()
            self.came = -self.parameter.detach().double()

    @property
    def residual(self) -> Tensor:
        return self.session.resume.residual()["w"]


class StockDoor(Door):
    """The door of a rank whose network takes the part of stock Horovod."""

    def __init__(self, rank: Rank):
        super().__init__(has_optimizers=rank.optimizer is not None)
        self._rank = rank

    def start_stock_allreduce(self, slot: Any) -> None:
        grad, network = self._rank.parameter.grad, self._rank.network
        assert grad is not None
        grad.copy_(network.start(Reduce(grad.clone(), 1 / network.world.size), "stock")())


def start(ranks: int, spec: str, hosts: list[str] | None = None, optimizer_of: Any = None) -> list[Rank]:
    """Make the ranks of a network. Each session finds every rank's optimizer now, and not while other threads look."""
    generation = Generation(ranks)
    made = [Rank(generation, rank, spec, hosts[rank] if hosts else "", optimizer_of) for rank in range(ranks)]
    for one, other in itertools.product(made, made):
        if other.optimizer is not None:
            one.session.updates.optimizers.find(other.optimizer)
    return made


def move(ranks: list[Rank]) -> None:
    """Initialise the network anew, with these ranks in this order."""
    generation = Generation(len(ranks))
    for number, rank in enumerate(ranks):
        rank.network.move(generation, number)


def together(ranks: list[Rank], call: Callable[[Rank], Any]) -> list[Any]:
    """Call on all ranks at once, and return the results, or the errors in their places."""

    def caught(rank: Rank) -> Any:
        try:
            return call(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(caught, ranks))
