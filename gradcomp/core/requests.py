"""Requests: the three operations that a compressor may ask of the network, their payloads and their replies.

A compressor never talks to the network. It yields a request and is resumed with the reply.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor


class World(NamedTuple):
    """The ranks of an exchange, seen from one of them.

    Attributes:
        rank: This rank's number.
        size: The number of ranks.
        hosts: Each rank's host as a number; None if hosts are unknown.
        numbers: Each rank's number in the whole job; None if it is the same.
    """

    rank: int
    size: int
    hosts: tuple[int, ...] | None = None
    numbers: tuple[int, ...] | None = None

    def number(self, rank: int) -> int:
        """Return a rank's number in the whole job, by which messages name it."""
        return rank if self.numbers is None else self.numbers[rank]

    @property
    def others(self) -> list[int]:
        """Return all ranks except this one."""
        return [rank for rank in range(self.size) if rank != self.rank]

    @property
    def share(self) -> float:
        """Return the factor of a summand: a power of two, with which a sum over all ranks is at most the largest entry."""
        return 2.0 ** -(self.size - 1).bit_length()

    @property
    def mean_of_shares(self) -> float:
        """Return the factor that turns a sum of shares into the mean over the ranks."""
        return 1 / (self.size * self.share)

    @property
    def shares_hosts(self) -> bool:
        """True if there are several hosts, and all have equally many ranks, and several."""
        counts = {self.hosts.count(host) for host in self.hosts or ()} if self.hosts is not None else {1}
        return len(counts) == 1 and 1 < counts.pop() < self.size

    def on_other_host(self, rank: int) -> bool:
        """Say whether a rank is on another host. Each rank counts as a host of its own where hosts are unknown."""
        return rank != self.rank if self.hosts is None else self.hosts[rank] != self.hosts[self.rank]


class Field(NamedTuple):
    """One array inside a payload. holds: the entries that it stands for, where they are packed."""

    name: str
    dtype: torch.dtype
    length: int
    holds: int = 0


# The fields of a payload. All ranks use the same form, so the length of a message never has to be sent.
Form = tuple[Field, ...]


@dataclass(eq=False)
class Payload:
    """A message: one byte buffer, which travels, and named arrays that are views of it."""

    form: Form
    bytes: Tensor
    arrays: Mapping[str, Tensor] = field(repr=False)

    def __getitem__(self, name: str) -> Tensor:
        return self.arrays[name]


class Purpose(Enum):
    """The part of a training that makes a request: the meeting of the ranks, or the steps after it."""

    STEP = "step"
    MEETING = "meeting"


class Gather(NamedTuple):
    """The request to give every rank's payload to every rank. The reply is a list of payloads in rank order."""

    payload: Payload
    purpose: Purpose = Purpose.STEP


class Reduce(NamedTuple):
    """The request to sum a float32 or float64 tensor over the ranks. The reply is scale times the sum, maybe in its memory."""

    tensor: Tensor
    scale: float = 1.0
    purpose: Purpose = Purpose.STEP


class Send(NamedTuple):
    """The request to give each named rank its own payload, all of one form. The reply is {sender: payload}.

    Every rank takes part, even with no payloads. Each rank names its senders, so no message announces its size.
    """

    payloads: Mapping[int, Payload]
    senders: Collection[int]
    form: Form
    device: torch.device
    purpose: Purpose = Purpose.STEP


Request = Gather | Reduce | Send
Reply = list[Payload] | Tensor | dict[int, Payload]
T = TypeVar("T")
# Requests[T] is a generator that yields requests, is resumed with their replies and returns a T.
# A yielded tensor is given away: the network may overwrite it. A reply is read-only.
Requests = Generator[Request, Reply | None, T]


def gather(payload: Payload) -> Requests[list[Payload]]:
    """Ask for the payloads of all ranks, in rank order."""
    reply = yield Gather(payload)
    assert isinstance(reply, list)
    return reply


def reduce(tensor: Tensor, scale: float = 1.0) -> Requests[Tensor]:
    """Ask for scale times the sum of all ranks' tensors. The network may overwrite the tensor."""
    reply = yield Reduce(tensor, scale)
    assert isinstance(reply, Tensor)
    return reply


def send(
    payloads: Mapping[int, Payload], senders: Collection[int], form: Form, device: torch.device
) -> Requests[dict[int, Payload]]:
    """Give each named rank its payload, and ask for the payloads that the senders give to this rank."""
    reply = yield Send(payloads, senders, form, device)
    assert isinstance(reply, dict)
    return reply


def bytes_of(request: Request, counts: Callable[[int], bool] = lambda rank: True) -> int:
    """Count the bytes that a rank hands to the network: a gather's payload, a reduction's tensor, or the payloads of a send.

    counts: says for which receivers the payloads of a send count.
    """
    if isinstance(request, Send):
        return sum(payload.bytes.numel() for rank, payload in request.payloads.items() if counts(rank))
    sent = request.payload.bytes if isinstance(request, Gather) else request.tensor
    return sent.numel() * sent.element_size()
