"""Simulated ranks that exchange updates: each has weights and an optimizer of its own, and a session as behind DDP."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from gradcomp.core.requests import Reduce, Request
from gradcomp.engine.phases import Door
from gradcomp.engine.reducer import Options
from gradcomp.engine.session import Session
from gradcomp.engine.slots import Parameters
from gradcomp.engine.updates.steps import ignore
from gradcomp.networks import Answer
from gradcomp.networks.memory import Board, MemoryNetwork
from gradcomp.spec import make


class Turn(threading.Condition):
    """The turn of one thread, while the others wait for messages. has_failed: some rank has, and nobody is to wait for it."""

    has_failed = False


class ThreadNetwork(MemoryNetwork):
    """The network of a rank with a thread of its own."""

    def __init__(self, board: Board, rank: int, turn: Turn):
        super().__init__(board, rank, ranks_per_host=1)
        self._turn = turn

    def start(self, request: Request, name: str) -> Answer:
        """Post a request. The answer lets other ranks have their turns until all have posted theirs."""
        if isinstance(request, Reduce):  # a rank may write to its tensor again before another has read the sum
            request = Reduce(request.tensor.clone(), request.scale)
        turn, rank = self._turn, self.world.rank
        its = self._board.post(name, rank, request)
        turn.notify_all()

        def answer() -> Any:
            turn.wait_for(lambda: its.missing == 0 or turn.has_failed)
            if its.missing:
                raise RuntimeError(f"rank {rank} ends: another rank has failed")
            reply = its.reply(rank)
            return reply.clone() if isinstance(reply, Tensor) else reply

        return answer


class Replica:
    """One rank's weights, optimizer and session."""

    def __init__(self, spec: str, model: nn.Module, optimizer: torch.optim.Optimizer, network: MemoryNetwork, seed: int):
        self.optimizer, self.parameters = optimizer, [*model.parameters()]
        parameters, door = Parameters(model.named_parameters()), Door(has_optimizers=True)
        self.session = Session(make(spec), parameters, network, Options(seed=seed), door)

    def step(self, grads: Sequence[Tensor]) -> None:
        """Step on this rank's own gradients. The session exchanges what that does to the weights."""
        flat, session = [grad.reshape(-1) for grad in grads], self.session
        session.begin()
        session.updates.gradients.add(flat)
        if (poison := session.steps.end_backward()) is not None:
            flat[0] = flat[0].clone()
            flat[0][:1].add_(poison)
        session.updates.note_backward()
        for parameter, grad in zip(self.parameters, flat, strict=True):
            parameter.grad = grad.view(parameter.shape)
        self.optimizer.step()


class Replicas:
    """All ranks' replicas. The first one's weights are the model's.

    optimizer_of: makes a replica's optimizer. optimizers: of all ranks. bytes_sent: by each rank in the last step.
    """

    def __init__(
        self, spec: str, model: nn.Module, ranks: int, seed: int, optimizer_of: Callable[[nn.Module], torch.optim.Optimizer]
    ):
        self._turn, board = Turn(), Board(ranks)
        models = [model, *(copy.deepcopy(model) for _ in range(ranks - 1))]
        self._replicas = [
            Replica(spec, each, optimizer_of(each), ThreadNetwork(board, rank, self._turn), seed)
            for rank, each in enumerate(models)
        ]
        self._pool = ThreadPoolExecutor(ranks, initializer=torch.set_num_threads, initargs=(1,))
        self.optimizers = [each.optimizer for each in self._replicas]
        self.bytes_sent = [0] * ranks

    def step(self, grads: Sequence[Sequence[Tensor]]) -> None:
        """Take a step of all ranks, each on its own gradients.

        Raises:
            RuntimeError: The ranks' weights differ in some bit afterwards.
        """
        futures = [self._pool.submit(self._take_turn, *each) for each in zip(self._replicas, grads, strict=True)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:  # the first that was raised is the cause of the others
            raise next((each for each in errors if "another rank has failed" not in str(each)), errors[0])
        first, *others = self._replicas
        for rank, other in enumerate(others, 1):
            if not all(map(_are_equal, first.parameters, other.parameters)):
                raise RuntimeError(f"rank {rank} has other weights than rank 0: {first.session.spec} is not deterministic")
        self.bytes_sent = [each.session.reducer.bytes_sent for each in self._replicas]

    def close(self) -> None:
        """Let other optimizers step the model as if nobody exchanged anything."""
        for each in self._replicas:
            ignore(each.session)
        self._pool.shutdown()

    def _take_turn(self, replica: Replica, grads: Sequence[Tensor]) -> None:
        with self._turn:
            try:
                replica.step(grads)
            except BaseException:
                self._turn.has_failed = True
                self._turn.notify_all()
                raise


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Compare to the last bit. A NaN equals any other."""
    return bool(torch.equal(one, other)) or bool(((one == other) | (one.isnan() & other.isnan())).all())
