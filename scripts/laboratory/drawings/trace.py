"""A real step of simulated ranks, with all that they asked of the network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import gradcomp
from gradcomp.core.requests import Gather, Payload, Reduce, Request, Send
from gradcomp.messages import payload as payloads
from gradcomp.networks import Answer, Network


@dataclass(frozen=True)
class Message:
    """One request of one rank, and the reply. to: the receivers, of a send with payloads."""

    kind: str
    payload: Payload | None
    tensor: Tensor | None
    to: tuple[int, ...]
    reply: Any


@dataclass(frozen=True)
class Trace:
    """The last step of a simulation.

    accs: residual and gradient of each rank. states: of each rank, for a model of one bucket.
    """

    ranks: int
    accs: list[list[float]]
    messages: list[list[Message]]
    update: list[float]
    residuals: list[list[float]]
    bytes_sent: list[int]
    states: list[Any]


class Recorder:
    """A network that keeps copies of what its rank asks for and gets."""

    def __init__(self, network: Network):
        self.network, self.world = network, network.world
        self.messages: list[Message] = []

    def start(self, request: Request, name: str) -> Answer:
        """Keep a request, and pass it on."""
        kind, payload, tensor, to = _copied(request)
        own = self.network.start(request, name)

        def answer() -> Any:
            reply = own()
            kept = reply.clone() if isinstance(reply, Tensor) else reply
            self.messages.append(Message(kind, payload, tensor, to, kept))
            return reply

        return answer


def _copied(request: Request) -> tuple[str, Payload | None, Tensor | None, tuple[int, ...]]:
    match request:
        case Gather(payload):
            return "gather", _copy(payload), None, ()
        case Reduce(tensor):
            return "reduce", None, tensor.clone(), ()
        case Send(sent):
            first = next(iter(sent.values()), None)
            return "send", first and _copy(first), None, tuple(sent)


def _copy(payload: Payload) -> Payload:
    copy = payloads.empty(payload.form, payload.bytes.device)
    copy.bytes.copy_(payload.bytes)
    return copy


def trace(spec: str, steps: Sequence[Sequence[Sequence[float]]], shapes: dict[str, int] | None = None) -> Trace:
    """Run steps, and record the last one. steps: the gradients of each rank in each step; shapes: names and sizes of layers."""
    grads = [torch.tensor(step, dtype=torch.float32) for step in steps]
    shapes = shapes or {"w": grads[0].shape[1]}
    simulation = gradcomp.Simulation(spec, {name: (size,) for name, size in shapes.items()}, len(steps[0]))
    recorders: list[Recorder] = []
    waiting: list[list[float]] = []
    update: dict[str, Tensor] = {}
    ranks = range(len(steps[0]))
    for number, step in enumerate(grads):
        if number == len(grads) - 1:
            waiting = [_flat(simulation.residual(rank)) for rank in ranks]
            recorders = [Recorder(reducer.network) for reducer in simulation._reducers]
            for reducer, recorder in zip(simulation._reducers, recorders, strict=True):
                reducer.network = recorder
        update = simulation.step([dict(zip(shapes, row.split(list(shapes.values())), strict=True)) for row in step])
    return Trace(
        len(ranks),
        (grads[-1] + torch.tensor(waiting)).tolist(),
        [recorder.messages for recorder in recorders],
        _flat(update),
        [_flat(simulation.residual(rank)) for rank in ranks],
        list(simulation.bytes_sent),
        [reducer.buckets[0].state for reducer in simulation._reducers],
    )


def _flat(named: dict[str, Tensor]) -> list[float]:
    return [value for tensor in named.values() for value in tensor.flatten().tolist()]
