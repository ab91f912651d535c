"""Bytes that change on their way: no exchange reads or writes outside of its arrays, whatever arrives.

torch's own operations raise IndexError or RuntimeError for a place outside of a tensor; on a GPU they would end the process.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import gradients
import pytest
import specs
import torch

import gradcomp
from gradcomp.core.compressor import Acc
from gradcomp.core.requests import Payload, Purpose, Reply, Request, Send, World
from gradcomp.exchanges import routes
from gradcomp.messages import payload as payloads
from gradcomp.messages.sparse import CODECS
from gradcomp.native import kernels
from gradcomp.native.memory import Memory
from gradcomp.networks import Answer
from gradcomp.networks.memory import MemoryNetwork

N = 12_300  # four blocks for each of three ranks
# Besides, a search of which each rank does a part.
SPECS = [*specs.ALL, "gs_sgd:ratio=0.0157,rows=3,columns=160"]
WORDS = (-1, -(2**31), 2**31 - 1, N, 65_536, 0x7FC00000)


def broken(payload: Payload, draw: random.Random) -> Payload:
    """Copy a payload, with one to three of its words changed."""
    data = payload.bytes.clone()
    words = data[: len(data) // 4 * 4].view(torch.int32)
    for _ in range(draw.randint(1, 3) if len(words) else 0):
        words[draw.randrange(len(words))] = draw.choice([*WORDS, draw.randrange(-(2**31), 2**31)])
    return payloads.read(payload.form, data)


def break_one(reply: Reply, own: int, draw: random.Random) -> Reply:
    """Break the payload of another rank, if payloads came."""
    if isinstance(reply, list):
        chosen = draw.choice([rank for rank in range(len(reply)) if rank != own])
        return [broken(payload, draw) if rank == chosen else payload for rank, payload in enumerate(reply)]
    if isinstance(reply, dict) and reply:
        chosen = draw.choice(sorted(reply))
        return {**reply, chosen: broken(reply[chosen], draw)}
    return reply


@pytest.mark.parametrize("spec", SPECS)
def test_no_place_that_arrives_is_trusted(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start: Callable[[MemoryNetwork, Request, str], Answer] = MemoryNetwork.start
    draw = random.Random(spec)

    def break_answers(self: MemoryNetwork, request: Request, name: str) -> Answer:
        answer = start(self, request, name)
        if request.purpose is not Purpose.STEP:  # ranks that read other meetings leave them at other rounds
            return answer
        return lambda: break_one(answer(), self.world.rank, draw) if draw.random() < 0.5 else answer()

    monkeypatch.setattr(MemoryNetwork, "start", break_answers)
    for attempt in range(12):
        simulation = gradcomp.Simulation(spec, {"w": (N,)}, 3)
        for step in range(3):
            grads = [{"w": gradients.draw("normal", N, 10 * attempt + 3 * step + rank)} for rank in range(3)]
            try:
                simulation.step(grads)
            except (ValueError, RuntimeError) as error:  # the simulator compares the ranks' updates
                assert "is malformed" in str(error) or "has another update" in str(error)
                break


@pytest.mark.parametrize("spec", ["gtopk:ratio=0.01", "topk:ratio=0.01,route=tree"])
@pytest.mark.parametrize("value", [-1, -(2**31)])
def test_a_rank_does_not_trust_its_own_payload_after_it_was_sent(
    spec: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value of 0 keeps the entry out of the result. A negative index would end in torch's IndexError."""
    start: Callable[[MemoryNetwork, Request, str], Answer] = MemoryNetwork.start

    def break_own(self: MemoryNetwork, request: Request, name: str) -> Answer:
        answer = start(self, request, name)
        if isinstance(request, Send) and self.world.rank == 2 and request.payloads:
            (own,) = request.payloads.values()
            own["indices"][0], own["values"][0] = value, 0.0
        return answer

    monkeypatch.setattr(MemoryNetwork, "start", break_own)
    simulation = gradcomp.Simulation(spec, {"w": (N,)}, 3)
    with pytest.raises(ValueError, match="the payload of this rank is malformed: it names indices outside"):
        simulation.step([{"w": gradients.draw("normal", N, rank)} for rank in range(3)])


def test_a_malformed_payload_raises_and_names_the_rank() -> None:
    for form in ("compact", "exact"):
        acc = Acc(torch.randn(100_000), Memory())
        taken = CODECS[form].allocate(acc, 50)
        kernels.take_topk(acc.residual, 50, *taken.unpacked)
        steps = routes.allgather(acc, taken, World(0, 2))
        request = next(steps)
        malformed = payloads.read(request.payload.form, request.payload.bytes.clone())
        malformed["header"][0] = -5
        with pytest.raises(ValueError, match="the payload of rank 1 is malformed: its header holds the count -5"):
            steps.send([request.payload, malformed])
