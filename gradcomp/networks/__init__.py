"""Networks: implementations of start(request, name), which starts an operation and returns a function for the reply."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from gradcomp.core.requests import Gather, Reply, Request, World
from gradcomp.messages import payload

# Waits for the reply to a request, and returns it.
Answer = Callable[[], Reply]


class Network(Protocol):
    """Carries out the requests of one rank. A request has the same name on all ranks and in every step."""

    @property
    def world(self) -> World: ...
    def start(self, request: Request, name: str) -> Answer: ...


class Connection(Network, Protocol):
    """A network between processes. Its ranks must meet before they exchange gradients."""

    # Each rank's host as a number; None until the ranks have met.
    hosts: tuple[int, ...] | None
    # The name of the latest meeting, the same on all ranks, in which a network may name its operations.
    meeting: str
    # The device of the tensors that the ranks exchange when they meet.
    device: torch.device

    @property
    def generation(self) -> object:
        """Changes whenever the network is re-initialised. The ranks then meet again."""

    @property
    def ready(self) -> bool:
        """True if the network is initialised, so that the world is known."""

    @property
    def host(self) -> str:
        """A name for this rank's host, different on each host."""

    def prepare(self) -> None:
        """Prepare for the meeting of the ranks."""

    def failure(self, text: str) -> Exception:
        """Make the error of an exchange that cannot go on."""
        return RuntimeError(text)


def gather(network: Network, own: Tensor, name: str) -> Callable[[], list[Tensor]]:
    """Begin to gather a flat array of each rank. Return a function that waits for those of all ranks."""
    answer: Any = network.start(Gather(payload.wrap(own)), name)
    return lambda: [reply["bytes"] for reply in answer()]
