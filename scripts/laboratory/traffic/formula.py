"""The messages and bytes of every request: those that gloo sends under Horovod 0.28.1.

Its sources say: an allreduce of any size is a ring; an allgather is a ring; an alltoall is a message to every other rank, empty
or not, after another one with its length. Horovod may fuse concurrent operations, which saves messages, not bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import gradcomp
from gradcomp.core.compressor import Layer
from gradcomp.core.requests import Gather, Reduce, Request, Send, World
from gradcomp.engine.buckets.bucket import Bucket
from gradcomp.engine.steps.reducer import Reducer
from gradcomp.messages.payload import ALIGNMENT, wrap
from gradcomp.native.memory import Memory, Update
from gradcomp.networks import Answer, Network
from gradcomp.networks.memory import Board, MemoryNetwork

# Bytes that a ring sends at once, at most.
SEGMENT = 1 << 20

# Bytes in front of a message. Gloo announces each one by two more, from its sender and from its receiver.
PREAMBLE = 48

# Bytes of the length of one payload in an alltoall.
LENGTH = 4


def model(size: int) -> dict[str, tuple[int, ...]]:
    """Make names and shapes of this many parameters: two large layers, and a bias."""
    bias = size // 1000
    first = (size - bias) // 2
    return {"first": (first, 1), "bias": (bias,), "second": (size - bias - first, 1)}


@dataclass(frozen=True)
class Sent:
    """Messages, empty ones included, and the compressors' bytes in them.

    lengths: messages that carry the length of another; `messages` counts them too.
    """

    messages: int = 0
    bytes: int = 0
    lengths: int = 0

    def __add__(self, other: Sent) -> Sent:
        return Sent(self.messages + other.messages, self.bytes + other.bytes, self.lengths + other.lengths)

    @property
    def framing(self) -> int:
        """Return the bytes that gloo adds to these messages and to as many received ones, and those of lengths."""
        return 3 * PREAMBLE * self.messages + LENGTH * self.lengths


def sent(request: Request, world: World) -> Sent:
    """Count what this rank sends for a request."""
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
    """Count an allreduce by a ring: a rank sends every chunk but its own, then every sum but its neighbour's.

    That is 2 (P - 1) / P of the bytes, up to the rounding of chunks. Every rank has a chunk of two segments or more.
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
    """Return an allreduce's segments in a chunk, and bytes in a segment. The last ones may be shorter, or empty."""
    each = max(2, -(-count * element // (SEGMENT * ranks)))
    return each, element * -(-count // (each * ranks))


class Counting:
    """A network that counts the requests of one rank."""

    def __init__(self, network: Network):
        self._network = network
        self.clear()

    def clear(self) -> None:
        """Begin at 0."""
        self.operations: Counter[str] = Counter()
        self.sent = Sent()

    @property
    def world(self) -> World:
        """Return the ranks."""
        return self._network.world

    def start(self, request: Request, name: str) -> Answer:
        """Count a request, and pass it on."""
        self.operations[type(request).__name__] += 1
        self.sent += sent(request, self.world)
        return self._network.start(request, name)


def simulate(spec: str, shapes: Mapping[str, Sequence[int]], ranks: int) -> list[Counting]:
    """Count what each simulated rank sends in one step.

    The last answers go to rank 0 alone: nothing is sent after them, and a thousand ranks would take long to add them up.
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
        done = {bucket.index for bucket in first.buckets if bucket.running is None}
        for reducer in others:
            for bucket in reducer.buckets:
                if bucket.index in done:
                    bucket.running = bucket.answer = None
            reducer.advance()
    return counting


def layers(shapes: Mapping[str, Sequence[int]]) -> dict[str, Layer]:
    """Describe a model of these shapes to a reducer."""
    return {name: Layer(torch.Size(shape).numel(), torch.device("cpu"), len(shape)) for name, shape in shapes.items()}


def ignore(bucket: Bucket, update: Update) -> None:
    """Leave the gradients as they are, for the next step or the next rank."""


def random(shapes: Mapping[str, Sequence[int]], seed: int) -> dict[str, Tensor]:
    """Draw gradients. The bytes depend on their number alone, or nearly."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(tuple(shape), generator=generator) for name, shape in shapes.items()}


def hollow(request: Request, world: World) -> Request:
    """Make the same operation with as many messages, of a few bytes."""
    least = wrap(torch.zeros(ALIGNMENT, dtype=torch.uint8))
    match request:
        case Gather():
            return Gather(least)
        case Reduce(tensor, scale):
            count, (_, segment) = tensor.numel(), segments(tensor.numel(), tensor.element_size(), world.size)
            return Reduce(torch.zeros(-(-count * tensor.element_size() // segment)), scale)
        case Send(parts, senders):
            return Send(dict.fromkeys(parts, least), senders, least.form, torch.device("cpu"))
