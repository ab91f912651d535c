"""The vocabulary: what a compressor is, what it may ask of the network, and what a bucket is made of.

A compressor takes what it sends out of the tensor; what is left in the tensor is the error. It never talks to the network: it
yields what it wants moved and is resumed with the answer.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from gradcomp import knobs
from gradcomp.native.memory import Memory, Update


class World(NamedTuple):
    """The ranks that exchange with one another, and this one's place among them. hosts: a number for each rank's host."""

    rank: int
    size: int
    hosts: tuple[int, ...] | None = None

    @property
    def others(self) -> list[int]:
        """All ranks but this one."""
        return [rank for rank in range(self.size) if rank != self.rank]

    def apart(self, rank: int) -> bool:
        """Whether a rank is on another host. Where hosts are not known, each rank counts as a host."""
        return rank != self.rank if self.hosts is None else self.hosts[rank] != self.hosts[self.rank]


class Field(NamedTuple):  # one array inside a payload
    name: str
    dtype: torch.dtype
    length: int


Form = tuple[Field, ...]
"""What a payload is made of. All ranks use the same form, so nobody has to say how long a message is."""


@dataclass(frozen=True)
class Payload:
    """A message: named arrays that are views of one byte buffer, the one that travels."""

    form: Form
    bytes: Tensor
    arrays: Mapping[str, Tensor] = field(repr=False)

    def __getitem__(self, name: str) -> Tensor:
        return self.arrays[name]


class Gather(NamedTuple):
    """Give every rank every rank's payload. The answer: a list of payloads in rank order."""

    payload: Payload


class Reduce(NamedTuple):
    """Sum a float32 tensor over the ranks. The answer: scale times the sum, possibly in the same memory."""

    tensor: Tensor
    scale: float = 1.0


class Send(NamedTuple):
    """Give each named rank a payload of its own, all of one form. The answer: {rank: payload} of those who sent here.

    Every rank takes part, also with no parts. Each knows its senders, so that nobody has to ask.
    """

    parts: Mapping[int, Payload]
    senders: Collection[int]
    form: Form
    device: torch.device


Request = Gather | Reduce | Send
Reply = list[Payload] | Tensor | dict[int, Payload]
T = TypeVar("T")
Asking = Generator[Request, Reply | None, T]
"""Code that asks the network and in the end returns something. A yielded tensor is given away, a reply is read-only."""
Steps = Asking[Update]
"""An exchange under way. All ranks yield the same sequence of requests, one at least."""


def gather(payload: Payload) -> Asking[list[Payload]]:
    """Ask for every rank's payload, in rank order."""
    reply = yield Gather(payload)
    assert isinstance(reply, list)
    return reply


def reduce(tensor: Tensor, scale: float = 1.0) -> Asking[Tensor]:
    """Ask for scale times the sum of all ranks' tensors. The tensor is given away."""
    reply = yield Reduce(tensor, scale)
    assert isinstance(reply, Tensor)
    return reply


def send(
    parts: Mapping[int, Payload], senders: Collection[int], form: Form, device: torch.device
) -> Asking[dict[int, Payload]]:
    """Give each named rank a payload; ask for those that the senders give this one."""
    reply = yield Send(parts, senders, form, device)
    assert isinstance(reply, dict)
    return reply


class Layer(NamedTuple):
    """One parameter: its entries, where they are, and how many dimensions it has."""

    size: int
    device: torch.device
    dims: int = 1


class Layout(NamedTuple):
    """What a bucket is made of: its layers, one after the other in one flat array."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    device: torch.device

    @property
    def total(self) -> int:
        return sum(self.sizes)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Where each layer begins and ends."""
        ends = itertools.accumulate(self.sizes)
        return [(end - size, end) for size, end in zip(self.sizes, ends, strict=True)]

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Each layer's part of the bucket's flat array."""
        return {name: flat[begin:end] for name, (begin, end) in zip(self.names, self.spans, strict=True)}


@dataclass(frozen=True, eq=False)
class Acc:
    """What a compressor works on: the gradient plus the residual, flat, in float32.

    memory: lends updates, and scratch for kernels. velocity: the local momentum, if it is masked where something is taken.
    flag: int32[1], not 0 where a gradient was not finite; None where nobody looked.
    moments: float64[layers, MOMENTS], each layer's statistics, for a compressor that needs them.
    rates: each layer's learning rate, where known. peaks: the largest magnitude in each line of value, for takes on a CPU.
    """

    value: Tensor
    memory: Memory = field(default_factory=Memory)
    velocity: Tensor | None = None
    flag: Tensor | None = None
    moments: Tensor | None = None
    rates: tuple[float, ...] | None = None
    peaks: Tensor | None = None


@dataclass(frozen=True)
class Traits:
    """What others must know of a configured compressor.

    whole_model: it wants one bucket for everything, without overlap with backward.
    unbiased: what it sends is right in the mean without error feedback.
    against_feedback: why there must be no error feedback around it.
    moments: which statistics of each layer it reads, of what has accumulated or of the raw gradient.
    sparse: it takes the few largest entries, and peaks tell it where to look. momentum: what it keeps itself.
    rates: what learning rates are to it.
    ends: the model's first and last layers are treated otherwise than those between.
    """

    whole_model: bool = False
    unbiased: bool = False
    against_feedback: str | None = None
    moments: Literal["accumulated", "raw"] | None = None
    sparse: bool = False
    momentum: float = 0.0
    rates: Literal["unused", "used", "needed"] = "unused"
    ends: bool = False


class Compressor(ABC):
    """Base of all compressors. Subclasses are frozen dataclasses whose fields are the knobs.

    init, exchange and traits make a compressor; the other methods are optional. str() gives the canonical spec, with the knobs
    that differ from their defaults: make(str(compressor)) is the same compressor.
    """

    name: ClassVar[str] = ""  # as a spec says it: that of the file

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.name = cls.__module__.rpartition(".")[2]
        cls.__doc__ = knobs.document(cls)

    def __post_init__(self) -> None:
        knobs.check(self, self.name)

    def __str__(self) -> str:
        return ":".join(filter(None, (self.name, ",".join(knobs.given(self)))))

    @property
    def traits(self) -> Traits:
        return Traits()

    def init(self, layout: Layout, seed: int) -> Any:
        """Make what one bucket keeps between steps."""
        return None

    @abstractmethod
    def exchange(self, acc: Acc, state: Any, world: World) -> Steps:
        """Take out of acc.value what is sent; return the mean update over the ranks. What stays in acc.value is the error.

        The law: mean(acc.value before) == mean(acc.value after) + update."""

    def choose(self, name: str, layer: Layer) -> Compressor:
        """Choose the compressor for a layer. Layers whose compressors are equal share buckets."""
        return self

    def ease(self, progress: float) -> Compressor | None:
        """Make a gentler form for warming up: at 0 it would send everything, at 1 it is this one. None if there is none."""
        return None

    def revise(self, value: Tensor, velocity: Tensor | None, state: Any, rates: tuple[float, ...]) -> None:
        """Scale what waits, before a gradient is added that will be used with these learning rates."""
        return

    def save(self, state: Any) -> dict[str, Any]:
        """Copy what a checkpoint must hold of the state."""
        return {}

    def load(self, state: Any, saved: Mapping[str, Any]) -> None:
        """Put back what save() gave."""
        return

    def alike(self, state: Any) -> str:
        """Describe what of the state must be the same on all ranks; they compare it before their first exchange."""
        return ""

    def stats(self, state: Any) -> dict[str, Any]:
        """Give figures of the last step."""
        return {}
