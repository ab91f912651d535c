"""A network of one rank that stands for all: it records every message, and replies as if the other ranks had sent the same."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import NamedTuple

import torch

from gradcomp.core.requests import Gather, Reduce, Reply, Request, Send, World, bytes_of
from gradcomp.messages import payload as payloads
from gradcomp.networks import Answer


class Message(NamedTuple):
    """A rank's message for one request. kind: gather, reduce or send. bytes: handed to the network.

    to: of a send, the bytes for each receiver. senders: of a send, those whose payloads arrive, each of `bytes_in`.
    """

    kind: str
    bytes: int
    to: Mapping[int, int] = {}
    senders: tuple[int, ...] = ()
    bytes_in: int = 0


class Part(NamedTuple):
    """The computing of a bucket up to a message. seconds: since its last reply, or since its gradients were ready.

    message: None in the last part of a bucket. payloads: in the reply before, of a gather.
    """

    seconds: float
    message: Message | None
    payloads: int = 0


class Bucket(NamedTuple):
    """The layers of a bucket, in the order of the model, and its parts. on_updates: they follow the optimizer's step."""

    names: tuple[str, ...]
    parts: tuple[Part, ...]
    on_updates: bool = False


def wait(device: torch.device) -> None:
    """Wait until the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class RecordingNetwork:
    """The network. parts: of each bucket, in the last step.

    most: the most bytes in a reply to a gather. least: the payloads that it holds all the same.
    """

    def __init__(self, world: World, device: torch.device, most: float = math.inf, least: int = 2):
        self.world, self.device, self._most, self._least = world, device, most, least
        self.parts: dict[int, list[Part]] = {}
        self._since = 0.0
        self._bucket = 0
        self._received: int | None = None  # payloads of the latest reply, until it is followed by a message or an end

    def begin(self, bucket: int) -> None:
        """Begin to compute for a bucket, until the next message."""
        self._bucket = bucket
        wait(self.device)
        self._since = time.perf_counter()

    def start(self, request: Request, name: str) -> Answer:
        """Record a request."""
        bucket, kind = self._bucket, type(request).__name__.lower()
        message = Message(kind, bytes_of(request))
        if isinstance(request, Send):
            to = {rank: payload.bytes.numel() for rank, payload in request.payloads.items()}
            message = Message(kind, message.bytes, to, tuple(request.senders), payloads.size(request.form))
        self._record(message)
        reply = self._reply(request)

        def answer() -> Reply:
            self.close()
            self._received = len(reply) if isinstance(request, Gather) else 0
            self.begin(bucket)
            return reply

        return answer

    def close(self) -> None:
        """Record the computing time of a finished bucket, if it sent nothing after its last reply."""
        if self._received is not None:
            self._record(None)

    def _record(self, message: Message | None) -> None:
        wait(self.device)
        part = Part(time.perf_counter() - self._since, message, self._received or 0)
        self.parts.setdefault(self._bucket, []).append(part)
        self._received = None

    def _reply(self, request: Request) -> Reply:
        match request:
            case Gather(payload):
                held = max(self._least, min(self.world.size, self._most // payload.bytes.numel()))
                return [payload] * int(min(held, self.world.size))
            case Reduce(tensor, scale):
                return tensor.mul_(scale * self.world.size)
            case Send(own, senders, form, device):
                like = next(iter(own.values()), None)
                if like is None or (own.keys() & {*senders} and any(field.name == "header" for field in form)):
                    # Ranks exchange entries of each other's parts, and this rank's part may not have those places: none at all.
                    like = payloads.read(form, torch.zeros(payloads.size(form), dtype=torch.uint8, device=device))
                return dict.fromkeys(senders, like)
