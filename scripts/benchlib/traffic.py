"""What a rank puts on the wire: for every request the messages that gloo sends under Horovod 0.28.1, and their bytes.

As the sources have it: an allreduce is a ring, whatever its size; an allgather is a ring; an alltoall is a message to every
other rank, also an empty one, and beforehand Horovod sends each another one, which says how long it is. What travels at the
same time Horovod may fuse; that saves messages, not bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import gradcomp
from gradcomp.engine.reducer import Bucket, Reducer
from gradcomp.messages.payload import ALIGNMENT, whole
from gradcomp.native.memory import Memory, Update
from gradcomp.networks import Answer, Network
from gradcomp.networks.memory import Board, MemoryNetwork
from gradcomp.protocol import Layer
from gradcomp.requests import Gather, Reduce, Request, Send, World

SEGMENT = 1 << 20  # bytes that a ring sends at once, at most
PREAMBLE = 48  # bytes in front of a message; gloo announces each one by two more, from its sender and from its receiver
SPLIT = 4  # bytes in which Horovod says how long a part of an alltoall is


def model(size: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of so many parameters: two large layers, and a bias."""
    bias = size // 1000
    first = (size - bias) // 2
    return {"first": (first, 1), "bias": (bias,), "second": (size - bias - first, 1)}


@dataclass(frozen=True)
class Sent:
    """Messages, empty ones among them, and the bytes of compressors in them."""

    messages: int = 0
    bytes: int = 0
    lengths: int = 0  # messages that say how long others are; counted in messages too

    def __add__(self, other: Sent) -> Sent:
        return Sent(self.messages + other.messages, self.bytes + other.bytes, self.lengths + other.lengths)

    @property
    def framing(self) -> int:
        """Bytes that gloo adds to them, and to as many that a rank receives, and those that say lengths."""
        return 3 * PREAMBLE * self.messages + SPLIT * self.lengths


def sent(request: Request, world: World) -> Sent:
    """What this rank sends for a request."""
    others = world.size - 1
    match request:
        case Gather(payload):
            return Sent(others, others * payload.bytes.numel())
        case Reduce(tensor):
            return ring(tensor.numel(), tensor.element_size(), world)
        case Send(parts):
            size = sum(payload.bytes.numel() for to, payload in parts.items() if to != world.rank)
            return Sent(2 * others, size, others)


def ring(count: int, element: int, world: World) -> Sent:
    """An allreduce: on the way to the sum all chunks go on but a rank's own, and all but its neighbour's when they are summed.

    That is 2 (P - 1) / P of the bytes, up to the rounding of chunks: every rank has one, of two segments at least.
    """
    if world.size == 1:
        return Sent()
    size, each, segment = count * element, *segments(count, element, world.size)

    def span(first: int, last: int) -> Sent:
        found = max(0, min(size, last * each * segment) - first * each * segment)
        return Sent(-(-found // segment), found)

    def but(chunk: int) -> Sent:
        return span(0, chunk) + span(chunk + 1, world.size)

    return but(world.rank) + but((world.rank - 1) % world.size)


def segments(count: int, element: int, ranks: int) -> tuple[int, int]:
    """Of an allreduce: segments in a chunk, and bytes in a segment; the last ones may be shorter, or empty."""
    each = max(2, -(-count * element // (SEGMENT * ranks)))
    return each, element * -(-count // (each * ranks))


class Counting:
    """A rank's network that counts what goes through it, whatever asks for it."""

    def __init__(self, network: Network):
        self._network = network
        self.clear()

    def clear(self) -> None:
        self.operations: Counter[str] = Counter()
        self.sent = Sent()

    @property
    def world(self) -> World:
        return self._network.world

    def start(self, request: Request, name: str) -> Answer:
        self.operations[type(request).__name__] += 1
        self.sent += sent(request, self.world)
        return self._network.start(request, name)


def simulate(spec: str, shapes: Mapping[str, Sequence[int]], ranks: int) -> list[Counting]:
    """What each of so many simulated ranks sends in one step.

    The last answers are given to rank 0 alone: nothing is sent any more, and with a thousand ranks adding up would take long.
    """
    compressor, own, board, memory = gradcomp.make(spec), layers(shapes), Board(ranks), Memory()
    grads = random(shapes, 0)
    counting = [Counting(MemoryNetwork(board, rank, ranks_per_host=1)) for rank in range(ranks)]
    reducers = [Reducer(compressor, own, network, 25, 0, deliver=ignore, memory=memory) for network in counting]
    for reducer in reducers:
        for name, grad in grads.items():
            reducer.mark_ready(name, grad)
    first, *others = reducers
    while first.advance():
        done = {bucket.index for bucket in first.buckets if bucket.steps is None}
        for reducer in others:
            for bucket in reducer.buckets:
                if bucket.index in done:
                    bucket.steps = bucket.answer = None
            reducer.advance()
    return counting


def layers(shapes: Mapping[str, Sequence[int]]) -> dict[str, Layer]:
    """What a reducer is told of a model of these shapes."""
    return {name: Layer(torch.Size(shape).numel(), torch.device("cpu"), len(shape)) for name, shape in shapes.items()}


def ignore(bucket: Bucket, update: Update) -> None:
    """Deliver nothing: the gradients stay as they are, for the next step or the next rank."""


def random(shapes: Mapping[str, Sequence[int]], seed: int) -> dict[str, Tensor]:
    """Gradients that stand in for real ones: what is sent hangs on their number alone, or nearly."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(tuple(shape), generator=generator) for name, shape in shapes.items()}


def hollow(request: Request, world: World) -> Request:
    """The same operation with next to nothing in it: as many messages, of a few bytes."""
    least = whole(torch.zeros(ALIGNMENT, dtype=torch.uint8))
    match request:
        case Gather():
            return Gather(least)
        case Reduce(tensor, scale):
            count, (_, segment) = tensor.numel(), segments(tensor.numel(), tensor.element_size(), world.size)
            return Reduce(torch.zeros(-(-count * tensor.element_size() // segment)), scale)
        case Send(parts, senders):
            return Send(dict.fromkeys(parts, least), senders, least.form, torch.device("cpu"))
