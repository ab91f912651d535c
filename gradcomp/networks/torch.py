"""Requests as collective operations of a process group of torch.distributed, asked for by all ranks in the same order."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import torch
import torch.distributed as dist

from gradcomp.messages import payload
from gradcomp.networks import Answer
from gradcomp.networks.mail import mail, opened
from gradcomp.requests import Gather, Reduce, Reply, Request, Send, World

all_gather: Callable[..., dist.Work] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""One operation that has two names, of which some versions of torch do not know the first, and others warn of the second."""


class TorchNetwork:
    """Requests as collective operations of a process group, asked for by all ranks in the same order."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self.group = group
        self.hosts: tuple[int, ...] | None = None
        self.device = torch.device("cpu") if dist.get_backend(group) == "gloo" else device  # NCCL takes the GPU's alone

    @property
    def world(self) -> World:
        return World(dist.get_rank(self.group), dist.get_world_size(self.group), self.hosts)

    @property
    def generation(self) -> object:
        """The group: it lasts as long as the model's DistributedDataParallel."""
        return self.group

    @property
    def host(self) -> str:
        return f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}"  # by which torchrun numbers the hosts

    def prepare(self) -> None:
        """There is nothing to be prepared."""

    def start(self, request: Request, name: str) -> Answer:
        """Set an operation going; calling the result waits for its answer."""
        match request:
            case Gather(own):
                came = own.bytes.new_empty(self.world.size * own.bytes.numel())
                waiting = all_gather(came, own.bytes, self.group, async_op=True)
                return _after(waiting, lambda: [payload.read(own.form, part) for part in came.chunk(self.world.size)])
            case Reduce(tensor, scale):
                waiting = dist.all_reduce(tensor, group=self.group, async_op=True)
                return _after(waiting, lambda: tensor if scale == 1 else tensor.mul_(scale))
            case Send():
                outgoing, goes, comes = mail(request, self.world)
                came = outgoing.new_empty(sum(comes))
                waiting = dist.all_to_all_single(came, outgoing, comes, goes, self.group, async_op=True)
                return _after(waiting, lambda: opened(request, came, comes))


def _after(waiting: dist.Work | None, answer: Answer) -> Answer:
    """Waits, which with NCCL is the stream's to do, and then answers."""
    assert waiting is not None

    def answered() -> Reply:
        waiting.wait()
        return answer()

    return answered
