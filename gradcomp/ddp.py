"""All that knows torch.distributed: the exchange as a communication hook of DistributedDataParallel."""

# Not `from __future__ import annotations`: torch compares a hook's annotations with types, and would be given strings.

import os
import socket
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from gradcomp import wire
from gradcomp.core import Compressor, Gather, Reduce, Reply, Request, Send, World
from gradcomp.front import Front
from gradcomp.slot import Slot

Waiting = Callable[[], Reply]

all_gather: Callable[..., dist.Work] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""One operation that has two names, of which some versions of torch do not know the first, and others warn of the second."""


class Network:
    """Requests as collective operations of a process group, asked for by all ranks in the same order."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self.group = group
        self.hosts: tuple[int, ...] | None = None
        self.device = torch.device("cpu") if dist.get_backend(group) == "gloo" else device  # NCCL takes the GPU's alone

    @property
    def world(self) -> World:
        return World(dist.get_rank(self.group), dist.get_world_size(self.group), self.hosts)

    @property
    def session(self) -> object:
        """A group that is no longer there takes its model along."""
        return self.group

    @property
    def host(self) -> str:
        return f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}"  # by which torchrun numbers the hosts

    def enter(self) -> None:
        """There is nothing to be prepared."""

    def start(self, request: Request, name: str) -> Waiting:
        """Sets an operation going; calling the result waits for its answer."""
        match request:
            case Gather(payload):
                came = payload.bytes.new_empty(self.world.size * payload.bytes.numel())
                waiting = all_gather(came, payload.bytes, self.group, async_op=True)
                return _after(waiting, lambda: [wire.read(payload.form, part) for part in came.chunk(self.world.size)])
            case Reduce(tensor, scale):
                waiting = dist.all_reduce(tensor, group=self.group, async_op=True)
                return _after(waiting, lambda: tensor if scale == 1 else tensor.mul_(scale))
            case Send():
                outgoing, goes, comes = wire.mail(request, self.world)
                came = outgoing.new_empty(sum(comes))
                waiting = dist.all_to_all_single(came, outgoing, comes, goes, self.group, async_op=True)
                return _after(waiting, lambda: wire.opened(request, came, comes))

    def finish(self, handle: Waiting) -> Reply:
        return handle()


def _after(waiting: dist.Work | None, answer: Waiting) -> Waiting:
    """Waits, which with NCCL is the stream's to do, and then answers."""
    assert waiting is not None

    def answered() -> Reply:
        waiting.wait()
        return answer()

    return answered


SPARSE = (
    "sparse gradients, such as those of torch.nn.Embedding(sparse=True), cannot be compressed; use sparse=False, or leave that "
    "layer out of the model that DDP has"
)


def attach(
    model: DistributedDataParallel,
    spec: str | Compressor = "topk",
    *,
    optimizer: torch.optim.Optimizer | None = None,
    bucket_mb: float = 25,
    seed: int = 0,
) -> Front:
    """Exchanges the model's gradients as the spec says; called on all ranks. What is returned tells .stats(), has .state_dict()
    and .load_state_dict(), and can .change() to another spec.

    optimizer: lets a momentum in the spec be checked against the optimizer's own, and tells learning rates to what needs them.
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(f"attach() takes the model as DistributedDataParallel(...) gives it, not a {type(model).__name__}")
    ignored = model.parameters_to_ignore
    named = [(name, parameter) for name, parameter in model.module.named_parameters() if name not in ignored]
    network = Network(model.process_group, next(parameter.device for _, parameter in named))
    front = Front(spec, named, network, optimizer, bucket_mb, seed)
    front.meet()  # rather here than in a backward pass: DDP does not survive one that fails
    model.register_comm_hook(Pass(front, model.find_unused_parameters), hook)
    return front


class Pass:
    """What a backward pass has come to: what DDP was promised for the buckets that were ready, and their gradients."""

    def __init__(self, front: Front, some_unused: bool):
        self.front, self.some_unused = front, some_unused
        self.promised: list[tuple[torch.futures.Future[Tensor], Tensor]] = []
        self.grads: list[tuple[Slot, Tensor]] = []
        self.used: set[str] = set()

    def begin(self) -> None:
        """Whatever a pass that failed has left."""
        self.promised.clear()
        self.grads.clear()

    def finish(self) -> None:
        """The end: all that was promised is there."""
        self.front.finish()
        for promise, result in self.promised:
            promise.set_result(result)
        if self.some_unused and torch._C._current_graph_task_id() >= 0:  # DDP.join() calls hooks outside a pass
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: engine.queue_callback(self.complete))  # after DDP's own, which is not queued yet

    def complete(self) -> None:
        """DDP leaves alone a layer that no rank used in this pass; but what was left of it from other passes may have come."""
        for slot, grad in self.grads:
            if slot.parameter.grad is not None:
                self.used.add(slot.name)
            elif slot.name in self.used:
                slot.parameter.grad = torch.empty_like(slot.parameter)
            else:
                continue
            slot.open().view(-1).copy_(grad)
            slot.close()


def hook(state: Pass, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """DDP calls it for its buckets, in the same order on all ranks: backward goes on while what is full is exchanged, and with
    the last of them the pass is at its end, and waits."""
    buffer = bucket.buffer()
    if buffer.is_sparse:
        raise ValueError(SPARSE)
    if bucket.index() == 0:
        state.begin()
    for parameter, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
        slot, flat = state.front.slot(parameter), grad.view(-1)
        if state.some_unused:
            state.grads.append((slot, flat))
        state.front.put(slot, flat)
    future = torch.futures.Future[Tensor](devices=[buffer.device] if buffer.is_cuda else None)
    state.promised.append((future, buffer))
    if bucket.is_last():
        state.finish()
    return future
