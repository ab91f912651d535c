"""The whole vocabulary: what a compressor is, what it may ask of the network, and what a bucket is made of.

A compressor takes what it sends out of the tensor; what is left in the tensor is the error. It never talks to the network: it
yields what it wants moved and is resumed with the answer.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor


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
        """Whether a rank is on another host; of others nobody knows better where it is not said what hosts there are."""
        return rank != self.rank if self.hosts is None else self.hosts[rank] != self.hosts[self.rank]


class Field(NamedTuple):
    """One array inside a payload."""

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

    Every rank takes part in the round, also the one that has nothing to say: it yields Send({}, senders, form, device). And
    each knows from whom something comes, so that nobody has to ask.
    """

    parts: dict[int, Payload]
    senders: Collection[int]
    form: Form
    device: torch.device

    def check(self, came: Collection[int], name: str) -> None:
        """Refuses what came from others than were to send here."""
        if {*came} != {*self.senders}:
            raise RuntimeError(
                f"exchange {name}: something was to come from ranks {sorted(self.senders)}, but it came from {sorted(came)}: "
                "are all ranks at the same step?"
            )


Request = Gather | Reduce | Send
Reply = list[Payload] | Tensor | dict[int, Payload]
Steps = Generator[Request, Any, Tensor]
"""An exchange under way. A yielded tensor is given away, a reply is read-only. All ranks yield the same sequence of requests,
one at least."""


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


class Acc(NamedTuple):
    """What a compressor works on: the gradient plus the residual, flat, in float32.

    velocity: the local momentum, where error feedback keeps one and it is to be masked where something is taken; else None.
    flag: int32[1], not 0 where a gradient was not finite; None where nobody looked.
    moments: float64[layers, kernels.MOMENTS], each layer's statistics, for a compressor that needs them; else None.
    rates: each layer's learning rate in this step; None where no optimizer is known.
    peaks: the largest magnitude in each line of value, for takes on a CPU; None where nobody noted them.
    """

    value: Tensor
    velocity: Tensor | None = None
    flag: Tensor | None = None
    moments: Tensor | None = None
    rates: tuple[float, ...] | None = None
    peaks: Tensor | None = None


class Compressor(ABC):
    """Base of all compressors. Subclasses are frozen dataclasses whose fields are the knobs."""

    @property
    def whole_model(self) -> bool:
        """Whether it wants one bucket for everything: necessary for some algorithms, but no overlap with backward."""
        return False

    @property
    def unbiased(self) -> bool:
        """Whether what this configured instance sends is right in the mean without error feedback."""
        return False

    def against_feedback(self) -> str | None:
        """Why there must be no error feedback around it; None if there may be."""
        return None

    @property
    def moments(self) -> str | None:
        """Which statistics of each layer it reads: those of what has "accumulated", of the "raw" gradient, or none."""
        return None

    @property
    def sparse(self) -> bool:
        """Whether it takes the few largest entries: peaks then tell it where to look."""
        return False

    @property
    def local_momentum(self) -> float:
        """The momentum it keeps itself: the optimizer's own must then be 0."""
        return 0.0

    @property
    def needs_rates(self) -> bool:
        """Whether it cannot do without the optimizer's learning rates."""
        return False

    @property
    def reads_rates(self) -> bool:
        """Whether it makes use of the learning rates where they are known."""
        return self.needs_rates

    @property
    def tells_ends_apart(self) -> bool:
        """Whether the model's first and last layers are treated otherwise than those between."""
        return False

    def choose(self, name: str, layer: Layer) -> Compressor:
        """The compressor for this layer; layers whose compressors are equal share buckets."""
        return self

    def eased(self, progress: float) -> Compressor | None:
        """A gentler self for warming up: at 0 it would send everything, at 1 it is itself. None if there is no such thing."""
        return None

    def init(self, layout: Layout, seed: int) -> Any:
        """What one bucket keeps between steps."""
        return None

    def revise(self, value: Tensor, velocity: Tensor | None, state: Any, rates: tuple[float, ...]) -> None:
        """Called before a gradient is added, with the rates it will be used with: may scale what is left from earlier steps."""
        return

    def save(self, state: Any) -> dict[str, Any]:
        """What of its state a checkpoint must hold, in copies."""
        return {}

    def load(self, state: Any, saved: Mapping[str, Any]) -> None:
        """Puts back what save() gave."""
        return

    def alike(self, state: Any) -> str:
        """What of its state has to be the same on all ranks, for their first exchange to be one; they compare it before."""
        return ""

    def stats(self, state: Any) -> dict[str, Any]:
        """Figures of its own, of the last step."""
        return {}

    @abstractmethod
    def exchange(self, acc: Acc, state: Any, world: World) -> Steps:
        """Takes out of acc.value what it sends; returns the mean update over the ranks. What stays in acc.value is the error.

        The law: mean(acc.value before) == mean(acc.value after) + update.
        """


def bytes_of(request: Request, goes: Callable[[int], bool] = lambda rank: True) -> int:
    """What a rank hands to the network: a gather's capacity, a reduction's tensor, of a send the parts that go somewhere."""
    match request:
        case Gather(payload):
            return payload.bytes.numel()
        case Reduce(tensor):
            return tensor.numel() * tensor.element_size()
        case Send(parts):
            return sum(payload.bytes.numel() for rank, payload in parts.items() if goes(rank))
