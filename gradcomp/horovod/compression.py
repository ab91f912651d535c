"""Compression, the compression= of an hvd.DistributedOptimizer, and the exchange without its carriers."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor

from gradcomp.aliases import either
from gradcomp.core.compressor import Compressor
from gradcomp.engine.phases import Door
from gradcomp.engine.reducer import Options
from gradcomp.engine.session import Session
from gradcomp.engine.slots import Parameters, ParameterSlot, Slot, check_optimizer
from gradcomp.engine.updates.steps import warn_user
from gradcomp.handle import Handle, by_name
from gradcomp.networks.horovod import SUMMED, HorovodNetwork, exchange_failure

# The messages for a gradient that cannot be compressed, and for one of an unknown parameter.
SPARSE = (
    "sparse gradients, like those of torch.nn.Embedding(sparse=True), cannot be compressed through compression=, not even with "
    "sparse_as_dense=True; use sparse=False, or gradcomp.horovod.DistributedOptimizer, which exchanges them densely"
)
_UNKNOWN = (
    "a gradient belongs to no known parameter: its shape is {shape}; pass all parameters as named_parameters, and unfreeze "
    "them before making Compression or DistributedOptimizer"
)

_AFTER_FAILURE = (
    "; or, if the step failed on all ranks, call compression.load_state_dict() on all with a state from before, and then "
    "optimizer.load_state_dict(optimizer.state_dict()), with which Horovod forgets the step"
)

_CLASS = "compression= is the class Compression; pass an object: compression=Compression('topk', model.named_parameters())"

_DENSELY = (
    "the gradient of {name!r} is sparse, like those of torch.nn.Embedding(sparse=True). gradcomp exchanges it densely, like "
    "Horovod with sparse_as_dense=True: pass that, or use sparse=False, and this warning goes"
)

_POSITIONAL = (
    "Compression() takes the spec and named_parameters by position, and all else by name: "
    'gradcomp.horovod.Compression("topk", model.named_parameters(), bucket_mb=100)'
)
_ONE = (
    "optimizer= is a list; under Horovod each optimizer has its own hvd.DistributedOptimizer and its own Compression: make one "
    "of each for every optimizer, with named_parameters of its layers"
)


# In place of a generation.
_DISCARDED = object()


# A rank's carriers hold this and its rank. (If all gave 1, Average, Min, Max and Product would all give 1 back.)
CARRIER = 2.0


def scale_of_carrier(result: float, size: int) -> float:
    """Return the op's result over the mean: 1 for op=Average, the number of ranks for op=Sum. Refuse other ops."""
    for scale in (1.0, float(size)):
        if math.isclose(result, scale * (size + 3) / 2, rel_tol=1e-4):
            return scale
    others = {"Min": 2.0, "Max": size + 1.0, "Product": math.prod(range(2, min(size, 30) + 2))}
    op = next((op for op, expected in others.items() if math.isclose(result, expected, rel_tol=1e-4)), "")
    if not op:
        raise ValueError(
            f"the optimizer reduced a carrier to {result}, which fits neither op=Average nor op=Sum over {size} ranks; use one "
            "of these, and give hvd.DistributedOptimizer and Compression the same process set"
        )
    raise ValueError(f"the optimizer reduces gradients with op={op}, which cannot be compressed; use op=Average or op=Sum")


class Compression(Handle):
    """The compression= of an hvd.DistributedOptimizer. Each optimizer needs its own object.

    Only Horovod calls compress() and decompress().

    A spec that keeps a residual, such as topk, leaves gradients alone: each rank's optimizer steps on that rank's, and the
    ranks exchange weight updates after the step.

    Args:
        spec: "name:knob=value", a compressor, or "auto".
        named_parameters: Those of the optimizer, usually model.named_parameters().
        process_set: The optimizer's process set; all ranks by default.
        optimizer: Accepted, but not needed: gradcomp finds the optimizer of the parameters.
        scaler: The GradScaler, if one scales the loss. Only stats()["grad_norm"] needs it.
        bucket_mb: The largest size of a bucket, or bucket_cap_mb. See gradcomp.ddp.attach().
        seed: The seed of random draws, equal on all ranks.

    Raises:
        TypeError: named_parameters are no pairs of names and parameters, or process_set is no hvd.ProcessSet.
        ValueError: The spec or an option is wrong.

    Example:
        >>> compression = gradcomp.horovod.Compression("topk", model.named_parameters())
        >>> optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression)
    """

    @by_name(3, _POSITIONAL)
    def __init__(
        self,
        spec: str | Compressor,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        *,
        process_set: hvd.ProcessSet | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        scaler: torch.amp.GradScaler | None = None,
        bucket_mb: float | None = None,
        bucket_cap_mb: float | None = None,
        seed: int = 0,
    ):
        if process_set is not None and not isinstance(process_set, hvd.ProcessSet):
            raise TypeError(f"process_set is a {type(process_set).__name__}; pass the result of hvd.add_process_set(...)")
        if isinstance(optimizer, (list, tuple)):
            raise TypeError(_ONE)
        if optimizer is not None:
            check_optimizer(optimizer)
        self._network = HorovodNetwork(process_set or hvd.global_process_set)
        bucket_mb = either(None, bucket_mb=bucket_mb, bucket_cap_mb=bucket_cap_mb)
        options, self._parameters = Options(bucket_mb, seed), Parameters(named_parameters)
        stock = (torch.float32,) if self._parameters.types <= SUMMED else ()
        self._door = HorovodDoor(_UNKNOWN, _AFTER_FAILURE, has_optimizers=True, needs_gradients=True, name="Horovod")
        super().__init__(spec, self._parameters, self._network, options, self._door, stock)
        self._session.updates.gradients.scaler = scaler
        # Of the pass under way: Horovod exchanges its gradients; the number in this rank's carriers.
        self._leaves, self._carrier = False, 0.0
        self._result: tuple[object, float] = None, 0.0  # of the latest carrier, with the network's generation

    def compress(self, tensor: Tensor | None = None) -> tuple[Tensor, Slot | None]:
        """Take a gradient, and return a carrier in its place. Horovod gives the slot back to decompress().

        The gradient itself is returned, and no slot, where compression would not be worth it.

        The ranks meet in the hook of the first gradient. Two optimizers in one backward pass must get their first gradients in
        the same order on all ranks.
        """
        if tensor is None:  # Horovod has the class, and `self` is the gradient
            raise TypeError(_CLASS)
        # Python's calls are counted here: there is one of these methods for each gradient.
        session, known = self._session, self._parameters
        at = (known.last - 1) % len(known.slots)  # gradients come from the last layer to the first
        slot: ParameterSlot | None = known.slots[at]
        if slot is not None and slot.parameter.grad is tensor:
            known.last = at
        elif (slot := known.of_gradient(tensor)) is None:
            raise session.failed(ValueError(self._why_unknown(tensor)))
        if self._door.begun_in is not self._network.generation:
            self._begin()
        if self._leaves:
            return tensor, None
        if session.reducer.on_updates:
            return torch.ones(1), slot
        if slot.is_row_major and tensor.is_contiguous() and tensor.device == slot.layer.device:
            try:
                session.reducer.ready_all((slot,), (tensor,))
            except BaseException as error:
                session.failed(error)
                raise
        else:
            session.gradients.ready(slot)
        return torch.full((1,), self._carrier), slot

    def _give_back(self) -> None:
        self._door.give_back()
        none = hvd.Compression.none
        vars(self).update(compress=none.compress, decompress=none.decompress)

    def _begin(self) -> None:
        """Begin a backward pass."""
        session = self._session
        if session.reducer.on_updates:
            session.updates.note_left_out()
        session.gradients.begin()
        here = self._network.generation
        if session.membership.met_in is not here:  # now, since Horovod waits for ever for a carrier that another rank lacks
            session.meet()
        self._door.begun_in, self._leaves = here, session.gradients.stock is not None
        self._carrier = self._network.world.rank + CARRIER

    def decompress(self, tensor: Tensor, ctx: Slot | None) -> Tensor:
        """Return the gradient, which now holds the update. The reduced carrier reveals the op of the optimizer.

        Where updates are exchanged, the gradient is this rank's own.
        """
        if ctx is None and tensor.is_sparse:
            raise self._session.failed(ValueError(SPARSE))
        if self._door.begun_in is not None:
            self._end(tensor if ctx is not None and not self._door.holds else None)
        if ctx is None:
            return tensor
        assert ctx.parameter is not None and ctx.parameter.grad is not None
        grad = ctx.parameter.grad
        return grad.clone() if grad.is_sparse else grad  # Horovod clears a sparse one, and adds this

    def _end(self, carrier: Tensor | None) -> None:
        """End the backward pass."""
        session, door = self._session, self._door
        if not session.reducer.on_updates:
            if carrier is not None and (result := (door.begun_in, carrier.item())) != self._result:
                door.scale, self._result = self._scale(result[1]), result
            session.gradients.finish(door.scale)
        if session.reducer.on_updates:  # perhaps since finish()
            end_backward(session)
        door.begun_in = None

    def _scale(self, result: float) -> float:
        """Return the optimizer's op over the mean, as the result of a carrier shows it."""
        session = self._session
        try:
            scale = scale_of_carrier(result, self._network.world.size)
        except ValueError as error:
            if session.reducer.steps_done == 0:
                raise session.failed(error) from None
            # Earlier carriers were right: a rank that called hvd.join() adds 0.
            raise session.failed(exchange_failure(error)) from error
        session.sums = scale != 1.0
        return scale

    def _why_unknown(self, tensor: Tensor) -> str:
        if self._parameters.slot(tensor) is not None:
            return "op=Adasum reduces parameters, not gradients, and cannot be compressed; use op=Average or op=Sum"
        return SPARSE if self._parameters.any_sparse else _UNKNOWN.format(shape=tuple(tensor.shape))


def refused_op(op: Any) -> ValueError:
    """Make the error for an optimizer with another op than Average and Sum."""
    name = next((name for name in ("Adasum", "Min", "Max", "Product") if getattr(hvd, name, None) == op), op)
    return ValueError(f"op={name} cannot be compressed; use op=Average or op=Sum")


def end_backward(session: Session) -> None:
    """End a backward pass whose gradients stay this rank's own. One that is not finite on any rank becomes so on all."""
    first, found = None, dict[torch.device, list[Tensor]]()
    for parameter in session.slots.parameters.values():
        if (grad := parameter.grad) is not None:
            values = grad._values() if grad.is_sparse else grad
            if values.numel():
                first = values if first is None else first
                found.setdefault(values.device, []).append(values.contiguous())
    for each in found.values() or ([torch.zeros(1)],):  # ranks without a gradient take part, too
        session.updates.gradients.add(each)
    poison = session.updates.end_backward()
    session.updates.note_backward()
    if first is not None and poison is not None:
        first.as_strided((1,), (1,)).add_(poison.to(first.device))


class HorovodDoor(Door):
    """Horovod's door: its optimizers know their op.

    begun_in: the generation of the network in which the pass under way began; None from the end of one to the next. scale: the
    op's result over the mean.
    """

    begun_in: Any = None
    scale = 1.0

    def give_back(self) -> None:
        """Let Horovod reduce gradients itself."""

    def discard(self) -> None:
        self.begun_in = _DISCARDED  # the end of the pass is still asked for, and refused

    def calls_another(self, optimizer: torch.optim.Optimizer, has_gradients: bool) -> bool:
        if getattr(optimizer, "_synchronized", False):  # Horovod clears it, and calls its base class's step
            return True
        return not has_gradients and getattr(optimizer, "_should_synchronize", False)  # it reduces zeros first

    def adds_up(self, optimizer: torch.optim.Optimizer) -> bool | None:
        op = getattr(optimizer, "op", None)
        if op not in (None, hvd.Average, hvd.Sum):
            raise refused_op(op)
        return None if op is None else op == hvd.Sum


class CarrierFree(HorovodDoor):
    """The door without carriers: it takes the place of the stock optimizer's reduction of one gradient.

    Gradients are held until the ranks have met in step(), since steps have the same order on all ranks. The method that is
    replaced still reduces gradients that are not worth compressing.

    sparse_as_dense: the user knows that sparse gradients are exchanged densely.
    """

    def __init__(self, door: HorovodDoor, optimizer: Any, sparse_as_dense: bool):
        super().__init__(**vars(door) | {"holds": True})
        self._optimizer = weakref.ref(optimizer)  # which has the session
        self._takes_sparse = isinstance(optimizer, torch.optim.SparseAdam)  # and no dense ones
        self._sparse_as_dense = sparse_as_dense
        # Of the pass under way: its gradients come back by _wait(); Horovod's handles of those that it reduces itself.
        self._waits = False
        self._under_way: dict[Tensor, int] = {}

    def start(self, compression: Compression, p: Tensor) -> tuple[Callable[[], Tensor], Slot]:
        """Start the reduction of a gradient. Return a function that waits for it, and the slot for decompress()."""
        session = compression._session
        if self.begun_in is not session.network.generation:
            self._begin(session)
        slot: Any = session.slots.by_id.get(id(p)) or session.slot(p)
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        if session.reducer.on_updates:
            return functools.partial(getattr, p, "grad"), slot
        if p.grad.is_sparse:
            self._make_dense(slot)
        if self._waits:
            session.gradients.ready(slot)
            return functools.partial(self._wait, compression, p), slot
        if slot.is_row_major and p.grad.is_contiguous() and p.grad.device == slot.layer.device:
            try:
                session.reducer.ready_all((slot,), (p.grad,))
            except BaseException as error:
                session.failed(error)
                raise
        else:
            session.gradients.ready(slot)
        return functools.partial(getattr, p, "grad"), slot

    def _begin(self, session: Session) -> None:
        session.gradients.begin()
        self.begun_in = session.network.generation
        self.scale = float(session.network.world.size) if session.sums else 1.0
        self._waits = session.turns is not None or self._takes_sparse or session.membership.met_in is not self.begun_in
        self._under_way.clear()  # a failed step left them

    def give_back(self) -> None:
        vars(self._optimizer()).pop("_allreduce_grad_async")

    def _make_dense(self, slot: Slot) -> None:
        assert slot.parameter is not None and slot.parameter.grad is not None
        slot.parameter.grad = slot.parameter.grad.to_dense()
        if not self._sparse_as_dense:
            self._sparse_as_dense = True  # said
            warn_user(_DENSELY.format(name=slot.name))

    def _wait(self, compression: Compression, p: Tensor) -> Tensor:
        if self.begun_in is not None:
            compression._end(None)
        assert p.grad is not None
        if p in self._under_way:
            hvd.synchronize(self._under_way.pop(p))  # the gradient becomes the mean
        if self._takes_sparse and not p.grad.is_sparse:
            p.grad = p.grad.to_sparse()  # Horovod writes the update there
        return p.grad

    def start_stock_allreduce(self, slot: Slot) -> None:
        optimizer, parameter = self._optimizer(), slot.parameter
        assert optimizer is not None and parameter is not None
        self._under_way[parameter] = type(optimizer)._allreduce_grad_async(optimizer, parameter)[0]
