"""The door for DistributedDataParallel: the exchange as its communication hook."""

# Not `from __future__ import annotations`: torch compares a hook's annotations with types, and would be given strings.

from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from gradcomp.engine.parameters import Parameters, Slot
from gradcomp.engine.session import Options, Session
from gradcomp.handle import Handle
from gradcomp.networks.torch import TorchNetwork
from gradcomp.protocol import Compressor
from gradcomp.spec import make

__all__ = ["attach"]

_SPARSE = (
    "sparse gradients, such as those of torch.nn.Embedding(sparse=True), cannot be compressed; use sparse=False, or leave that "
    "layer out of the model that DDP has"
)
_UNKNOWN = "a gradient came of a parameter that attach() did not find in the model: add and unfreeze layers before attach()"


def attach(
    model: DistributedDataParallel,
    spec: str | Compressor = "topk",
    *,
    optimizer: torch.optim.Optimizer | None = None,
    bucket_mb: float = 25,
    seed: int = 0,
) -> Handle:
    """Exchange the model's gradients as the spec says, from the next backward pass on. All ranks call it.

    model: as DistributedDataParallel(...) gives it. spec: "name:knob=value", or a compressor.
    optimizer: lets a momentum in the spec be checked against the optimizer's own, and tells learning rates to specs that need
    them. bucket_mb: the most that layers in one bucket have, in 10^6 bytes. seed: of what is drawn, the same on all ranks.
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(f"attach() takes the model as DistributedDataParallel(...) gives it, not a {type(model).__name__}")
    ignored = model.parameters_to_ignore
    named = [(name, parameter) for name, parameter in model.module.named_parameters() if name not in ignored]
    network = TorchNetwork(model.process_group, next(parameter.device for _, parameter in named))
    session = Session(make(spec), Parameters(named), network, Options(optimizer, bucket_mb, seed), _UNKNOWN)
    session.meet()  # rather here than in a backward pass: DDP does not survive one that fails
    model.register_comm_hook(_Pass(session, model.find_unused_parameters), _hook)
    return Handle(session)


class _Pass:
    """What a backward pass has come to: what DDP was promised for the buckets that were ready, and their gradients."""

    def __init__(self, session: Session, some_unused: bool):
        self.session, self.some_unused = session, some_unused
        self.promised: list[tuple[torch.futures.Future[Tensor], Tensor]] = []
        self.grads: list[tuple[Slot, Tensor]] = []
        self.used: set[str] = set()

    def discard(self) -> None:
        """Discard the state of a failed backward pass."""
        self.promised.clear()
        self.grads.clear()

    def end(self) -> None:
        """End the pass: fulfil all that was promised."""
        self.session.finish_step()
        for promise, result in self.promised:
            promise.set_result(result)
        if self.some_unused and torch._C._current_graph_task_id() >= 0:  # DDP.join() calls hooks outside a pass
            _after_ddp(self.complete)

    def complete(self) -> None:
        """Write the updates of layers that DDP leaves alone because no rank used them: what was left of other passes."""
        for slot, grad in self.grads:
            if slot.parameter.grad is not None:
                self.used.add(slot.name)
            elif slot.name in self.used:
                slot.parameter.grad = torch.empty_like(slot.parameter)
            else:
                continue
            slot.open().view(-1).copy_(grad)
            slot.close()


def _after_ddp(function: Any) -> None:
    """Call a function at the end of this backward pass, after DDP's own callback, which is not queued yet."""
    engine = torch.autograd.Variable._execution_engine
    engine.queue_callback(lambda: engine.queue_callback(function))


def _hook(state: _Pass, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Take over one of DDP's buckets, which come in the same order on all ranks.

    Backward goes on while what is full is exchanged; with the last bucket the pass is at its end, and waits.
    """
    buffer = bucket.buffer()
    if buffer.is_sparse:
        raise ValueError(_SPARSE)
    if bucket.index() == 0:
        state.discard()
    for parameter, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
        slot, flat = state.session.slot(parameter), grad.view(-1)
        if state.some_unused:
            state.grads.append((slot, flat))
        state.session.mark_ready(slot, flat)
    future = torch.futures.Future[Tensor](devices=[buffer.device] if buffer.is_cuda else None)
    state.promised.append((future, buffer))
    if bucket.is_last():
        state.end()
    return future


def __dir__() -> list[str]:
    return __all__
