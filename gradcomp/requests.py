"""What a compressor may ask of the network: the messages, the three requests, and their answers.

A compressor never talks to the network. It yields what it wants moved and is resumed with the answer.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

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
        """Whether a rank is on another host. Where hosts are not known, each rank counts as a host."""
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

    Every rank takes part, also with no payloads. Each knows its senders, so that nobody has to ask.
    """

    payloads: Mapping[int, Payload]
    senders: Collection[int]
    form: Form
    device: torch.device


Request = Gather | Reduce | Send
Reply = list[Payload] | Tensor | dict[int, Payload]
T = TypeVar("T")
Asking = Generator[Request, Reply | None, T]
"""Code that asks the network and in the end returns something. A yielded tensor is given away, a reply is read-only."""


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
    payloads: Mapping[int, Payload], senders: Collection[int], form: Form, device: torch.device
) -> Asking[dict[int, Payload]]:
    """Give each named rank a payload; ask for those that the senders give this one."""
    reply = yield Send(payloads, senders, form, device)
    assert isinstance(reply, dict)
    return reply
