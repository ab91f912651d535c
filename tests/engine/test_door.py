"""A network and a door that the package has never heard of, made of its public pieces: they train as a simulation does."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from training import Training, draw

from gradcomp.core.requests import Gather, Reduce, Reply, Request, Send, World
from gradcomp.engine.phases import Door
from gradcomp.engine.reducer import Options
from gradcomp.engine.slots import Parameters
from gradcomp.handle import Handle
from gradcomp.networks import Connection

RANKS = 2


class Post:
    """The requests of all ranks, by name and turn."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, int], dict[int, Any]] = {}
        self.changed = threading.Condition()


class PostNetwork:
    """One rank's network."""

    device, ready, host = torch.device("cpu"), True, "here"

    def __init__(self, post: Post, rank: int):
        self.generation = self._post = post
        self.hosts: tuple[int, ...] | None = None
        self.meeting, self._rank, self._turns = "", rank, Counter[str]()

    @property
    def world(self) -> World:
        return World(self._rank, RANKS, self.hosts)

    def prepare(self) -> None:
        """Do nothing: the ranks are there."""

    def failure(self, text: str) -> Exception:
        return RuntimeError(text)

    def start(self, request: Request, name: str) -> Callable[[], Reply]:
        if isinstance(request, Reduce):  # its tensor may be overwritten
            request = Reduce(request.tensor.clone(), request.scale)
        turn = self._post.requests.setdefault((f"{self.meeting} {name}", self._turns[name]), {})
        self._turns[name] += 1
        with self._post.changed:
            turn[self._rank] = request
            self._post.changed.notify_all()

        def answer() -> Reply:
            with self._post.changed:
                assert self._post.changed.wait_for(lambda: len(turn) == RANKS, timeout=20), name
            match request:
                case Gather():
                    return [turn[rank].payload for rank in range(RANKS)]
                case Reduce(_, scale):
                    total = turn[0].tensor.clone()
                    for rank in range(1, RANKS):
                        total += turn[rank].tensor
                    return total.mul_(scale)
                case Send():
                    return {rank: turn[rank].payloads[self._rank] for rank in request.senders}

        return answer


class PostHandle(Handle):
    """The door: exchange() is called between backward() and the optimizer's step()."""

    def __init__(self, network: Connection, own: Training, spec: str):
        self._parameters = Parameters(own.weights.items())
        door = Door("the post knows no parameter of shape {shape}", "Call exchange() before each step")
        super().__init__(spec, self._parameters, network, Options(), door)

    def exchange(self) -> None:
        self._session.gradients.begin()
        for slot in self._parameters.slots:
            if slot.parameter.grad is None:
                slot.parameter.grad = torch.zeros_like(slot.parameter)
            self._session.gradients.ready(slot)
        self._session.gradients.finish()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


@pytest.mark.parametrize("spec", ["topk:ratio=0.1", "topk:ratio=0.1,route=split", "dense"])
def test_a_made_up_network_trains_as_a_simulation_does(spec: str) -> None:
    """To the last bit, with a gradient that is missing in one step, and a change of spec on the way."""
    post, every = Post(), [Training(None, sgd) for _ in range(RANKS)]
    wanted = Training(spec, sgd, ranks=RANKS)
    with ThreadPoolExecutor(RANKS) as pool:

        def together(call: Callable[[int], Any]) -> list[Any]:
            return list(pool.map(call, range(RANKS)))

        handles = [PostHandle(PostNetwork(post, rank), own, spec) for rank, own in enumerate(every)]
        for step in range(12):
            if step == 8:
                wanted.simulation.change("topk:ratio=0.5")
                together(lambda rank: handles[rank].change("topk:ratio=0.5"))
            grads: list[dict[str, Tensor]] = draw(step, ranks=RANKS)
            if step == 3:
                del grads[1]["0.bias"]
            for own, of_rank in zip(every, grads, strict=True):
                for name, weight in own.weights.items():
                    weight.grad = of_rank[name].clone() if name in of_rank else None
            together(lambda rank: handles[rank].exchange())
            for own in every:
                own.optimizer.step()
            wanted.step(grads)
    for rank, own in enumerate(every):
        own.ends_as(wanted, rtol=0, atol=0)
        for name, residual in handles[rank].residual().items():
            assert torch.equal(residual, wanted.simulation.residual(rank)[name])
        assert handles[rank].stats()["bytes_sent"] == wanted.simulation.bytes_sent[rank]
