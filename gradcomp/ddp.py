"""The door for DistributedDataParallel: attach() registers the exchange as the model's communication hook."""

# No `from __future__ import annotations` here: it makes annotations strings, and torch compares a hook's with types.

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from gradcomp.core.compressor import Compressor
from gradcomp.engine.optimizer_steps import warn_user
from gradcomp.engine.phases import Door
from gradcomp.engine.reducer import Options
from gradcomp.engine.session import Session
from gradcomp.engine.slots import Parameters
from gradcomp.handle import Handle, by_name
from gradcomp.networks.torch import TorchNetwork

__all__ = ["attach"]

# The messages for a gradient that cannot be compressed, and for one of an unknown parameter.
_SPARSE = (
    "sparse gradients, like those of torch.nn.Embedding(sparse=True), cannot be compressed; use sparse=False, or leave the "
    "layer out of the DistributedDataParallel model"
)
_UNKNOWN = (
    "a gradient belongs to a parameter of shape {shape} that attach() did not find in the model, or found frozen; add and "
    "unfreeze layers before attach()"
)

# The warning for a model that has been copied, since DDP copies its hooks and not the exchange.
_COPIED = (
    "this DistributedDataParallel model was copied, or loaded from a file, after attach(): it exchanges gradients whole. To "
    "compress them, call gradcomp.ddp.attach() on it"
)

_UNUSED = "Call the DistributedDataParallel model that attach() got, not the model inside it"

_POSITIONAL = (
    "attach() takes the model and the spec by position, and all else by name: "
    'gradcomp.ddp.attach(model, "topk", optimizer=optimizer)'
)

_DOOR = Door(_UNKNOWN, _UNUSED, ends_in_backward=True, name="DDP")


@by_name(2, _POSITIONAL)
def attach(
    model: DistributedDataParallel,
    spec: str | Compressor = "topk",
    *,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    scaler: "torch.amp.GradScaler | None" = None,
    bucket_mb: float = 25,
    seed: int = 0,
) -> Handle:
    """Compress the exchange of a model's gradients, from the next backward pass on. All ranks call it.

    Args:
        model: The result of DistributedDataParallel(...).
        spec: "name:knob=value", a compressor, or "auto".
        optimizer: The source of learning rates, for specs that need them; its momentum is taken over. Or the list of all
            optimizers of the model, each of layers of its own.
        scaler: The GradScaler that scales the loss, if one does.
        bucket_mb: The largest size of a bucket of several layers, in 10^6 bytes.
        seed: The seed of random draws, equal on all ranks.

    Returns:
        The handle of the exchange: stats(), residual(), change(), state_dict() and load_state_dict().

    Raises:
        TypeError: The model is not wrapped in DistributedDataParallel.
        ValueError: The spec or an option is wrong, or the ranks do not agree.
        RuntimeError: The model has a communication hook already.

    Example:
        >>> model = DistributedDataParallel(model)
        >>> handle = gradcomp.ddp.attach(model, "topk:ratio=0.01", optimizer=optimizer)
    """
    if isinstance(getattr(model, "_orig_mod", None), DistributedDataParallel):
        raise TypeError("attach() got a model that torch.compile() has wrapped; call attach() before torch.compile()")
    if type(model).__name__.startswith("FSDP"):
        raise TypeError(f"attach() got a {type(model).__name__}; call gradcomp.fsdp.attach(), the door of FSDP2")
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(f"attach() got a {type(model).__name__}; wrap the model in DistributedDataParallel first")
    ignored = model.parameters_to_ignore
    named = [(name, parameter) for name, parameter in model.module.named_parameters() if name not in ignored]
    network = TorchNetwork(model.process_group, next(parameter.device for _, parameter in named))
    parameters, options = Parameters(named), Options(optimizer, scaler, bucket_mb, seed)
    stock = (torch.float32, torch.bfloat16) if torch.float32 in parameters.types else (torch.float32,)
    handle = Handle(spec, parameters, network, options, _DOOR, stock)
    session = handle._session
    session.meet()  # here and not in a backward pass: DDP does not survive a backward pass that fails
    backward = _BackwardPass(session, model)
    try:
        model.register_comm_hook(backward, _hook)
    except RuntimeError as error:
        if "once" not in str(error):
            raise
        raise RuntimeError(
            "the model has a communication hook already; keep the handle of the first attach() and call its change(spec), or "
            "wrap the model in DistributedDataParallel again"
        ) from error
    model.register_forward_pre_hook(backward.expect)
    return handle


class _Contents(NamedTuple):
    """The contents of one of DDP's buckets: its buffer, and the slots and flat gradients in it."""

    buffer: Tensor
    slots: Sequence[Any]
    grads: Sequence[Tensor]


class _BackwardPass:
    """The state of a backward pass: the futures that DDP waits for, and the gradients in DDP's buckets.

    contents: of DDP's buckets, by number. They are the same in every pass, until DDP makes all buckets anew.
    promised: each future, and the buffer that becomes its result. grads: filled only where some layers may be unused.
    in_bucket: gradients lie in the buckets. used: the names of layers that have had a gradient in some pass. A copied
    model's has no session.
    """

    def __init__(self, session: Session, model: DistributedDataParallel):
        self.session, self.group = session, model.process_group
        self.some_unused, self.in_bucket = model.find_unused_parameters, model.gradient_as_bucket_view
        self.promised: list[tuple[torch.futures.Future[Tensor], Tensor]] = []
        self.grads: list[tuple[Any, Tensor]] = []
        self.contents: dict[int, _Contents] = {}
        self.used: set[str] = set()
        self.has_warned = False

    def expect(self, model: DistributedDataParallel, inputs: Any) -> None:
        """Let the session look at gradients before a backward pass, and not before a pass that goes round the model."""
        if "session" not in self.__dict__:
            self._warn_of_copy(model)
            return
        last, slots = self.session.last, self.session.slots.slots
        if not torch.is_grad_enabled() or model._join_config.enable:
            return
        if last.waits:
            last.watch(slots)
        needed = any(isinstance(each, Tensor) and each.requires_grad for each in inputs)
        if needed and not any(slot.parameter.requires_grad for slot in slots if slot.parameter is not None):
            last.note_frozen(self.session.reducer)

    def __getstate__(self) -> dict[str, Any]:
        """Leave all behind: copies and files of the model have no exchange, as DDP's reducer is not in them either."""
        return {"has_warned": False}

    def _warn_of_copy(self, model: DistributedDataParallel) -> None:
        if not self.has_warned and torch.is_grad_enabled() and model._comm_hooks[-1][1] is self:
            self.has_warned = True
            warn_user(_COPIED)

    def contents_of(self, bucket: GradBucket, buffer: Tensor) -> _Contents:
        """Return the contents of a bucket. DDP's new buckets have new buffers."""
        found = self.contents.get(index := bucket.index())
        if found is None or found.buffer is not buffer:
            if index == 0:
                self.contents.clear()
            slots = [self.session.slot(parameter) for parameter in bucket.parameters()]
            grads = buffer.split_with_sizes([slot.layer.size for slot in slots])
            found = self.contents[index] = _Contents(buffer, slots, grads)
        return found

    def discard(self) -> None:
        """Discard the state of a failed backward pass."""
        self.promised.clear()
        self.grads.clear()

    def end(self) -> None:
        """Finish the step, and complete all futures."""
        without_batch = torch._C._current_graph_task_id() < 0  # in DDP.join(): no step follows on this rank
        self.session.view.skips_optimizer = without_batch
        self.session.finish()
        self.session.announcement.look_without_step(self.session)
        for future, result in self.promised:
            future.set_result(result)
        if without_batch:
            self.session.view.forget_update()
        elif self.some_unused:
            _after_ddp(self.write_unused)

    def start_stock_allreduce(self, buffer: Tensor, form: torch.dtype, last: bool) -> torch.futures.Future[Tensor]:
        """Exchange a bucket as DDP's own hooks do. The last one ends the step for the session."""
        # DDP multiplies while it copies gradients into its bucket. Where they lie in there, it divides, as its bf16 hook does.
        form = form if form.itemsize < buffer.dtype.itemsize else buffer.dtype
        mean = _stock_mean(self.group, buffer, form, divides=self.in_bucket or form != buffer.dtype)
        if last:
            self.session.finish()
        return mean

    def write_unused(self) -> None:
        """Write the updates of layers that no rank used in this pass: DDP drops what residuals and momenta give them."""
        reducer = self.session.reducer
        if not (reducer.keeps_state or self.session.view.taken):
            return  # an update would be the rounding of zeros
        for slot, grad in self.grads:
            if slot.parameter.grad is not None:
                self.used.add(slot.name)
            elif not grad.any():  # DDP's None stays, and the optimizer leaves the layer alone
                continue
            elif slot.name in self.used or reducer.selects(slot):
                slot.parameter.grad = torch.empty_like(slot.parameter)
            else:
                reducer.take_back(slot, grad)
                continue
            slot.read().view(-1).copy_(grad)
            slot.close()


def _stock_mean(group: dist.ProcessGroup, tensor: Tensor, form: torch.dtype, divides: bool) -> torch.futures.Future[Tensor]:
    """Start the mean over the ranks in DistributedDataParallel's place, added up in this type.

    divides: False multiplies by the rounded inverse of the number of ranks.
    """
    sent, size = tensor.to(form), dist.get_world_size(group)
    work = dist.all_reduce(sent.div_(size) if divides else sent.mul_(1 / size), group=group, async_op=True)
    assert work is not None
    mean: torch.futures.Future[Tensor] = work.get_future().then(
        lambda done: tensor if sent is tensor else tensor.copy_(done.value()[0])
    )
    return mean


def _after_ddp(function: Any) -> None:
    """Call a function at the end of this backward pass, after DDP's own callback, which is not queued yet."""
    engine = torch.autograd.Variable._execution_engine
    engine.queue_callback(lambda: engine.queue_callback(function))


def _hook(state: _BackwardPass, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Exchange one of DDP's buckets. They come in the same order on all ranks.

    The exchange runs while backward continues. The last bucket ends the pass, and waits for all updates.
    """
    buffer, session = bucket.buffer(), state.session
    if buffer.is_sparse:
        raise session.failed(ValueError(_SPARSE))
    if bucket.index() == 0:
        state.discard()
        session.begin()
    if (stock := session.stock) is not None:
        return state.start_stock_allreduce(buffer, stock, bucket.is_last())
    contents = state.contents_of(bucket, buffer)
    if state.some_unused:
        state.grads += zip(contents.slots, contents.grads, strict=True)
        session.reducer.note_unused([slot.name for slot in contents.slots if slot.parameter.grad is None])
    session.ready_all(contents.slots, contents.grads)
    # Future[Tensor](...) would cost as much again, for the sake of a type.
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
    state.promised.append((future, buffer))
    if bucket.is_last():
        state.end()
    return future


def __dir__() -> list[str]:
    return __all__
