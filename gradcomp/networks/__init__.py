"""Three implementations of one method: start(request, name) sets an exchange going and returns what waits for the answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from gradcomp.requests import Reply, Request, World

Answer = Callable[[], Reply]
"""Waits for the answer of a request, and returns it."""


class Network(Protocol):
    """What moves requests between ranks. Names are the same on all ranks and in every step."""

    @property
    def world(self) -> World: ...
    def start(self, request: Request, name: str) -> Answer: ...


class Connection(Network, Protocol):
    """A network between processes, whose ranks have to meet before they exchange gradients."""

    hosts: tuple[int, ...] | None
    """A number for each rank's host, once the ranks have met."""

    device: torch.device
    """Where the tensors lie by which the ranks meet."""

    @property
    def generation(self) -> object:
        """Changes whenever the network is re-initialised; the ranks then meet again."""

    @property
    def host(self) -> str:
        """A name for this rank's host, another one on each host."""

    def prepare(self) -> None:
        """Prepare for the ranks' meeting."""
