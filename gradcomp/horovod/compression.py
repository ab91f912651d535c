"""Compression, the compression= of a stock hvd.DistributedOptimizer."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor

from gradcomp.core.compressor import Compressor
from gradcomp.engine.phases import Door
from gradcomp.engine.reducer import Options
from gradcomp.engine.session import Session
from gradcomp.engine.slots import Parameters, Slot
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

_UNUSED = (
    "Pass the Compression to hvd.DistributedOptimizer(optimizer, named_parameters=..., compression=...), and step that one"
)

# The lines with which an exchange ends before gradients are changed.
_CHANGED = (
    ":\n"
    "    optimizer.synchronize()\n"
    "    scaler.unscale_(optimizer)  # only with a GradScaler\n"
    "    ...  # change gradients here\n"
    "    with optimizer.skip_synchronize(): optimizer.step()  # with a GradScaler: scaler.step(optimizer)"
)

_AFTER_FAILURE = (
    "; or, if the step failed on all ranks, call compression.load_state_dict() on all with a state from before, and then "
    "optimizer.load_state_dict(optimizer.state_dict()), with which Horovod forgets the step"
)

_CLASS = "compression= is the class Compression; pass an object: compression=Compression('topk', model.named_parameters())"

_POSITIONAL = (
    "Compression() takes the spec and named_parameters by position, and all else by name: "
    'gradcomp.horovod.Compression("topk", model.named_parameters(), optimizer=optimizer)'
)
_ONE = (
    "optimizer= is a list; under Horovod each optimizer has its own hvd.DistributedOptimizer and its own Compression: make one "
    "of each for every optimizer, with named_parameters of its layers"
)

# Callers of compress() among which Horovod's optimizer is looked for.
_MOST_CALLERS = 4


def carrier_value(rank: int) -> Tensor:
    """Make a rank's carrier: the rank plus 2. (If all gave 1, Average, Min, Max and Product would all give 1 back.)"""
    return torch.full((1,), rank + 2.0)


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
    """The compression= of a stock hvd.DistributedOptimizer. Each optimizer needs its own object.

    Only Horovod calls compress() and decompress().

    Args:
        spec: "name:knob=value", a compressor, or "auto".
        named_parameters: Those of the optimizer, usually model.named_parameters().
        process_set: The optimizer's process set; all ranks by default.
        optimizer: The source of learning rates, for specs that need them; its momentum is taken over.
        scaler: The GradScaler that scales the loss, if one does.
        bucket_mb: The largest size of a bucket of several layers, in 10^6 bytes.
        seed: The seed of random draws, equal on all ranks.

    Raises:
        TypeError: named_parameters are no pairs of names and parameters, or process_set is none.
        ValueError: The spec or an option is wrong.

    Example:
        >>> compression = gradcomp.horovod.Compression("topk", model.named_parameters(), optimizer=optimizer)
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
        bucket_mb: float = 25,
        seed: int = 0,
    ):
        if process_set is not None and not isinstance(process_set, hvd.ProcessSet):
            raise TypeError(f"process_set is a {type(process_set).__name__}; pass the result of hvd.add_process_set(...)")
        if isinstance(optimizer, (list, tuple)):
            raise TypeError(_ONE)
        self._network = HorovodNetwork(process_set or hvd.global_process_set)
        options, self._parameters = Options(optimizer, scaler, bucket_mb, seed), Parameters(named_parameters)
        stock = (torch.float32,) if self._parameters.types <= SUMMED else ()
        door = Door(_UNKNOWN, _UNUSED, _CHANGED, _AFTER_FAILURE, name="Horovod")
        super().__init__(spec, self._parameters, self._network, options, door, stock)
        self._knows_optimizer = False
        if optimizer is not None:  # a program may broadcast its state before Horovod's makes a step
            self._session.view.origin.expect_marks(optimizer)

    def compress(self, tensor: Tensor | None = None) -> tuple[Tensor, Slot | None]:
        """Take a gradient, and return a carrier in its place. Horovod gives the slot back to decompress().

        The gradient itself is returned, and no slot, where compression would not be worth it.

        The ranks meet in the hook of the first gradient. Two optimizers in one backward pass must get their first gradients in
        the same order on all ranks.
        """
        if tensor is None:  # Horovod has the class, and `self` is the gradient
            raise TypeError(_CLASS)
        if not self._knows_optimizer:
            self._note_optimizer(_calling_optimizer())
        slot = self._parameters.of_gradient(tensor)
        if slot is None:
            raise self._session.failed(ValueError(self._why_unknown(tensor)))
        self._session.begin()
        if self._session.stock is not None:
            return tensor, None
        self._session.ready(slot)
        return carrier_value(self._network.world.rank), slot

    def decompress(self, tensor: Tensor, ctx: Slot | None) -> Tensor:
        """Return the gradient, which now holds the update. The reduced carrier reveals the op of the optimizer."""
        if ctx is not None:
            again: Any = tensor  # None where Horovod is asked again after a step that failed, which finish() refuses
            try:
                scale = 1.0 if again is None else scale_of_carrier(tensor.item(), self._network.world.size)
            except ValueError as error:
                if self._session.reducer.steps_done == 0:
                    raise self._session.failed(error) from None
                raise self._session.failed(
                    exchange_failure(error)
                ) from error  # earlier carriers were right: a rank that called hvd.join() adds 0
            self._session.finish(scale)
            assert ctx.parameter is not None and ctx.parameter.grad is not None
            return ctx.parameter.grad
        if tensor.is_sparse:
            raise ValueError(SPARSE)
        if self._session.stock is not None:
            self._session.finish()
        return tensor

    def _note_optimizer(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Note Horovod's optimizer, and whether its updates are sums."""
        self._knows_optimizer = True
        if optimizer is not None:
            self._session.view.note_optimizer(optimizer, self._session.compressor)
            if getattr(optimizer, "op", None) == hvd.Sum:
                self._session.view.sums = True

    def _session_of(self, optimizer: torch.optim.Optimizer) -> Session:
        """Return the session, and tell it its optimizer. A rank that joins a job meets others before its first gradient."""
        if not self._knows_optimizer:
            self._note_optimizer(optimizer)
        return self._session

    def _why_unknown(self, tensor: Tensor) -> str:
        if self._parameters.slot(tensor) is not None:
            return "op=Adasum reduces parameters, not gradients, and cannot be compressed; use op=Average or op=Sum"
        return SPARSE if self._parameters.any_sparse else _UNKNOWN.format(shape=tuple(tensor.shape))


def _calling_optimizer() -> torch.optim.Optimizer | None:
    """Find Horovod's optimizer among the callers of compress(): it is another object than the one that it was made of."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_MOST_CALLERS):
        if frame is None:
            return None
        if isinstance(caller := frame.f_locals.get("self"), torch.optim.Optimizer):
            return caller
        frame = frame.f_back
    return None
