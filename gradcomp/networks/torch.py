"""The network of torch.distributed: requests become collective operations of a process group."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import torch
import torch.distributed as dist

from gradcomp.messages import payload
from gradcomp.networks import Answer
from gradcomp.networks.mail import pack, unpack
from gradcomp.requests import Gather, Reduce, Reply, Request, Send, World

# One operation with two names: older versions of torch do not have the first, newer ones warn about the second.
all_gather: Callable[..., dist.Work] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class TorchNetwork:
    """Turns requests into collective operations of a process group. All ranks start them in the same order."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self.group = group
        self.hosts: tuple[int, ...] | None = None
        self.device = torch.device("cpu") if dist.get_backend(group) == "gloo" else device  # NCCL takes only a GPU's tensors

    @property
    def world(self) -> World:
        return World(dist.get_rank(self.group), dist.get_world_size(self.group), self.hosts)

    @property
    def generation(self) -> object:
        """The group, which lasts as long as the model's DistributedDataParallel."""
        return self.group

    @property
    def host(self) -> str:
        return f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}"  # torchrun's number of the host

    def prepare(self) -> None:
        """Do nothing: a process group is ready when it is made."""

    def start(self, request: Request, name: str) -> Answer:
        """Start an operation. The returned function waits for its reply."""
        match request:
            case Gather(sent):
                received = sent.bytes.new_empty(self.world.size * sent.bytes.numel())
                work = all_gather(received, sent.bytes, self.group, async_op=True)
                return _after(work, lambda: [payload.read(sent.form, part) for part in received.chunk(self.world.size)])
            case Reduce(tensor, scale):
                work = dist.all_reduce(tensor, group=self.group, async_op=True)
                return _after(work, lambda: tensor if scale == 1 else tensor.mul_(scale))
            case Send():
                outgoing, bytes_out, bytes_in = pack(request, self.world)
                incoming = outgoing.new_empty(sum(bytes_in))
                work = dist.all_to_all_single(incoming, outgoing, bytes_in, bytes_out, self.group, async_op=True)
                return _after(work, lambda: unpack(request, incoming, bytes_in))


def _after(work: dist.Work | None, read: Answer) -> Answer:
    """Return a function that waits for the operation and then reads the reply. With NCCL only the stream waits."""
    assert work is not None

    def answer() -> Reply:
        work.wait()
        return read()

    return answer
