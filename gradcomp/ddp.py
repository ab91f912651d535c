"""The integration of DistributedDataParallel: attach() registers the exchange as the model's communication hook."""

# No `from __future__ import annotations` here: it makes annotations strings, and torch compares a hook's with types.

import gc
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from gradcomp.aliases import either
from gradcomp.core.compressor import Compressor
from gradcomp.engine.phases import Door
from gradcomp.engine.reducer import Options
from gradcomp.engine.session import Session
from gradcomp.engine.slots import Parameters, check_optimizer
from gradcomp.engine.updates.steps import exchanged, give_up_failed, warn_user
from gradcomp.handle import Handle, by_name
from gradcomp.networks.torch import TorchNetwork, share_first

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
    "compress them, call gradcomp.ddp.attach() on it. With update specs, a copied optimizer has another state on each rank "
    'and moves the weights apart: call set_spec("dense") before the copy, or make a new one'
)

_POSITIONAL = (
    "attach() takes the model and the spec by position, and all else by name: "
    'gradcomp.ddp.attach(model, "topk", optimizer=optimizer)'
)

_MIXED = "DistributedDataParallel(mixed_precision=...) has a communication hook of its own: use torch.autocast in its place"

# DDP's method by which a rank in join() tells that it uses no layers, with find_unused_parameters.
_MATCH = "_match_unused_params_allreduce"


@by_name(2, _POSITIONAL)
def attach(
    model: DistributedDataParallel,
    spec: str | Compressor = "blocks",
    *,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    scaler: "torch.amp.GradScaler | None" = None,
    bucket_mb: float | None = None,
    bucket_cap_mb: float | None = None,
    seed: int = 0,
) -> Handle:
    """Compress the exchange of a model's gradients, from the next backward pass on. All ranks call it.

    A spec that rounds finely, such as blocks, exchanges gradients in backward(). One that keeps a residual, such as topk,
    leaves gradients alone: each rank's optimizer steps on that rank's, and the ranks exchange weight updates after step(). All
    ranks start from the first one's parameters and buffers.

    Args:
        model: The result of DistributedDataParallel(...).
        spec: "name:knob=value", a compressor, or "auto".
        optimizer: Accepted, but not needed: gradcomp finds all optimizers of the model's parameters.
        scaler: The GradScaler, if one scales the loss. Only stats()["grad_norm"] needs it.
        bucket_mb: The largest size of a bucket of several layers, in 10^6 bytes, or bucket_cap_mb. None: 25, but updates of
            weights travel in at most four buckets.
        seed: The seed of random draws, equal on all ranks.

    Returns:
        The handle of the exchange: stats(), residual(), set_spec(), remove(), state_dict() and load_state_dict().

    Raises:
        TypeError: The model is not wrapped in DistributedDataParallel.
        ValueError: The spec or an option is wrong, or the ranks do not agree.
        RuntimeError: The model has a communication hook already.

    Example:
        >>> model = DistributedDataParallel(model)
        >>> handle = gradcomp.ddp.attach(model, "topk:ratio=0.01")
    """
    if isinstance(getattr(model, "_orig_mod", None), DistributedDataParallel):
        raise TypeError("attach() got a model that torch.compile() has wrapped; call attach() before torch.compile()")
    if type(model).__name__.startswith("FSDP"):
        raise TypeError(f"attach() got a {type(model).__name__}; call gradcomp.fsdp.attach(), which is for FSDP2")
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(f"attach() got a {type(model).__name__}; wrap the model in DistributedDataParallel first")
    if getattr(model, "_use_python_reducer", False):  # since torch 2.4
        raise TypeError(
            'attach() got a model that was wrapped under torch._dynamo.config.optimize_ddp = "python_reducer", which gives '
            "hooks no buckets; leave that setting alone"
        )
    ignored = model.parameters_to_ignore
    named = [(name, parameter) for name, parameter in model.module.named_parameters() if name not in ignored]
    network = TorchNetwork(model.process_group, next(parameter.device for _, parameter in named))
    for each in optimizer if isinstance(optimizer, Sequence) else [] if optimizer is None else [optimizer]:
        check_optimizer(each)
    parameters, options = Parameters(named), Options(either(None, bucket_mb=bucket_mb, bucket_cap_mb=bucket_cap_mb), seed)
    stock = (torch.float32, torch.bfloat16) if torch.float32 in parameters.types else (torch.float32,)
    if not exchanged().isdisjoint(parameters.by_id):
        gc.collect()  # each rank would end an exchange that nobody has any more at a moment of its own
    handle = Handle(spec, parameters, network, options, Door(_UNKNOWN, has_optimizers=True, name="DDP"), stock)
    session = handle._session
    session.updates.gradients.scaler = scaler
    session.meet()  # here and not in a backward pass: DDP does not survive a backward pass that fails
    backward = _BackwardPass(session, model)
    removed: Any = next((each for _, each in model._comm_hooks if getattr(each, "is_removed", False)), None)
    try:
        if removed is None:
            model.register_comm_hook(backward, _hook)
        else:  # DDP lets no hook go
            vars(removed).update(vars(backward))
            backward = removed
    except RuntimeError as error:
        if "once" not in str(error):
            raise
        if model.mixed_precision is not None:
            raise RuntimeError(_MIXED) from error
        raise RuntimeError(
            "the model has a communication hook already; keep the handle of the first attach() and call its set_spec(spec), or "
            "wrap the model in DistributedDataParallel again"
        ) from error
    own = [*model.module.named_parameters(), *model.module.named_buffers()]
    share_first((each.detach() for name, each in own if name not in ignored), model.process_group)
    backward.looking = model.register_forward_pre_hook(backward.look)
    handle._give_back = backward.give_back
    return handle


class _Contents(NamedTuple):
    """The contents of one of DDP's buckets: its buffer, the slots and flat gradients in it, and their first entries."""

    buffer: Tensor
    slots: Sequence[Any]
    grads: Sequence[Tensor]
    firsts: Sequence[Tensor]


class _BackwardPass:
    """The state of a backward pass: the futures that DDP waits for, and the gradients in DDP's buckets.

    looking: the hook of look(). is_removed: DDP exchanges gradients as without gradcomp.
    contents: of DDP's buckets, by number. They are the same in every pass, until DDP makes all buckets anew.
    promised: each future, and the buffer that becomes its result. firsts: of the gradients that lie on a GPU. in_bucket:
    gradients lie in the buckets. A copied model's has no session.
    """

    def __init__(self, session: Session, model: DistributedDataParallel):
        self.session, self.group, self.model = session, model.process_group, weakref.ref(model)
        self.some_unused, self.in_bucket = model.find_unused_parameters, model.gradient_as_bucket_view
        self.promised: list[tuple[torch.futures.Future[Tensor], Tensor]] = []
        self.firsts: list[Tensor] = []
        self.contents: dict[int, _Contents] = {}
        self.has_warned = self.is_removed = False
        self.looking: Any = None

    def give_back(self) -> None:
        """Exchange gradients as DDP itself does, from now on."""
        self.is_removed = True
        self.looking.remove()
        self.session.reducer.buckets.clear()  # and their memory

    def look(self, model: DistributedDataParallel, inputs: Any) -> None:
        """Warn of a copy of the model, whose exchange was left behind. Undo steps that have failed."""
        if "session" not in self.__dict__:
            self._warn_of_copy(model)
        else:
            give_up_failed()

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
            found = self.contents[index] = _Contents(buffer, slots, grads, [each[:1] for each in grads if each.numel()])
        return found

    def promise(self, buffer: Tensor) -> torch.futures.Future[Tensor]:
        """Promise DDP a bucket's result."""
        # Future[Tensor](...) would cost as much again, for the sake of a type.
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
        self.promised.append((future, buffer))
        return future

    def end(self) -> None:
        """Complete all futures."""
        promised, self.promised = self.promised, []
        for future, result in promised:
            future.set_result(result)

    def keep_local(self, bucket: GradBucket, buffer: Tensor) -> torch.futures.Future[Tensor]:
        """Leave a bucket's gradients as they are. The last one ends the pass: what is not finite on one rank is so on all."""
        session = self.session
        future = self.promise(buffer)
        if not buffer.is_sparse and buffer.numel():
            session.updates.gradients.add((buffer,))
            if buffer.is_cuda:
                self.firsts += self.contents_of(bucket, buffer).firsts
        if bucket.is_last():
            poison = session.updates.end_backward()
            if poison is not None:
                self._poison(poison)
            self.end()
            if session.updates.lags:
                self._step_with_others()
            else:
                session.updates.note_backward()
        return future

    def _step_with_others(self) -> None:
        """Take part in the others' steps, in join(): after DDP has told which layers are used, as they do in their passes."""
        model = self.model()
        if model is None or not self.some_unused:
            self.session.updates.step_with_others()
            return

        def match() -> None:
            del model.__dict__[_MATCH]
            getattr(model, _MATCH)()
            self.session.updates.step_with_others()

        model.__dict__[_MATCH] = match  # DDP calls it next

    def _poison(self, poison: Tensor) -> None:
        """Add 0, or NaN, to a gradient of every parameter: each scaler, and each optimizer's, sees it.

        A GPU is not asked which of the two it is. DDP drops the gradients of layers that no rank has used.
        """
        dense = [buffer for _, buffer in self.promised if not buffer.is_sparse and buffer.numel()]
        if not poison.is_cuda and not dense[0].is_cuda:
            if bool(poison != 0):
                for buffer in dense:
                    buffer.add_(poison)
        elif self.some_unused:
            for buffer in dense:
                buffer.add_(poison.to(buffer.device, non_blocking=True))
        else:
            torch._foreach_add_(self.firsts, poison.to(self.firsts[0].device, non_blocking=True))

    def start_stock_allreduce(self, buffer: Tensor, form: torch.dtype, last: bool) -> torch.futures.Future[Tensor]:
        """Exchange a bucket as DDP's own hooks do. The last one ends the step for the session."""
        # DDP multiplies while it copies gradients into its bucket. Where they lie in there, it divides, as its bf16 hook does.
        form = form if form.itemsize < buffer.dtype.itemsize else buffer.dtype
        mean = _stock_mean(self.group, buffer, form, divides=self.in_bucket or form != buffer.dtype)
        if last:
            self.session.gradients.finish()
        return mean


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


def _hook(state: _BackwardPass, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Exchange one of DDP's buckets. They come in the same order on all ranks.

    The exchange runs while backward continues. The last bucket ends the pass, and waits for all updates.
    """
    buffer, session = bucket.buffer(), state.session
    if state.is_removed:
        return _stock_mean(state.group, buffer, buffer.dtype, divides=state.in_bucket)
    if bucket.index() == 0:
        state.promised.clear()
        state.firsts.clear()
        session.updates.lags = torch._C._current_graph_task_id() < 0  # in DDP.join()
        session.gradients.begin()
    if session.reducer.on_updates:
        return state.keep_local(bucket, buffer)
    if buffer.is_sparse:
        raise session.failed(ValueError(_SPARSE))
    if (stock := session.gradients.stock) is not None:
        return state.start_stock_allreduce(buffer, stock, bucket.is_last())
    contents = state.contents_of(bucket, buffer)
    session.gradients.ready_all(contents.slots, contents.grads)
    future = state.promise(buffer)
    if bucket.is_last():
        session.gradients.finish()
        state.end()
    return future


def __dir__() -> list[str]:
    return __all__
