"""The doors for Horovod, which stays as it is published.

`Compression` goes into the stock `hvd.DistributedOptimizer(compression=...)`: Horovod hands it every gradient and gets one
number back for each, the carrier, which it then reduces in the gradient's stead. `DistributedOptimizer` makes the stock
optimizer and hands the gradients over itself, so that no carrier travels.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

import horovod
import horovod.torch as hvd
import torch
from torch import Tensor

from gradcomp.engine.parameters import Parameters, Slot, named_of
from gradcomp.engine.session import Options, Session
from gradcomp.handle import Handle
from gradcomp.networks import carrier
from gradcomp.networks.horovod import HorovodNetwork, broken
from gradcomp.protocol import Compressor
from gradcomp.spec import make

__all__ = ["Compression", "DistributedOptimizer"]

_SPARSE = (
    "sparse gradients, such as those of torch.nn.Embedding(sparse=True), cannot be compressed (sparse_as_dense makes no "
    "difference); use sparse=False, or keep that layer in an optimizer of its own"
)
_UNKNOWN = (
    "a gradient came of a parameter that gradcomp does not know: it is not among the named_parameters that Compression or "
    "DistributedOptimizer was given, or was frozen then"
)


class Compression(Handle):
    """What the stock optimizer takes as compression=: one for each optimizer.

    spec: "name:knob=value", or a compressor. named_parameters: as for Horovod, usually model.named_parameters().
    process_set: the one the optimizer gets, if it gets one. optimizer: lets a momentum in the spec be checked against the
    optimizer's own, and tells learning rates to specs that need them. bucket_mb: the most that layers in one bucket have, in
    10^6 bytes. seed: of what is drawn, the same on all ranks. compress() and decompress() are Horovod's to call.
    """

    def __init__(
        self,
        spec: str | Compressor,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        *,
        process_set: hvd.ProcessSet | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        bucket_mb: float = 25,
        seed: int = 0,
    ):
        self._network = HorovodNetwork(process_set or hvd.global_process_set)
        options = Options(optimizer, bucket_mb, seed)
        super().__init__(Session(make(spec), Parameters(named_parameters), self._network, options, _UNKNOWN))

    def compress(self, tensor: Tensor) -> tuple[Tensor, Slot]:
        """Take a gradient over; Horovod gets a carrier in its stead, and hands the slot back to decompress().

        The ranks meet before the first carrier, inside a backward hook: in the first step, two optimizers in one backward have
        to reach their first gradients in the same order on all ranks.
        """
        slot = self._session.parameters.of_gradient(tensor)
        if slot is None:
            raise ValueError(self._why_unknown(tensor))
        self._session.mark_ready(slot)
        return carrier.carrier(self._network.world.rank), slot

    def decompress(self, tensor: Tensor, ctx: Slot | None) -> Tensor:
        """Give the gradient with the update in it; the reduced carrier tells how Horovod reduces."""
        if ctx is not None:
            try:
                scale = carrier.scale(tensor.item(), self._network.world.size)
            except ValueError as error:
                if self._session.steps_done == 0:
                    raise
                raise broken(error) from error  # it was right before: a rank that called hvd.join() adds a carrier of 0
            self._session.finish_step(scale)
            assert ctx.parameter.grad is not None
            return ctx.parameter.grad
        if tensor.is_sparse:
            raise ValueError(_SPARSE)
        return tensor

    def _why_unknown(self, tensor: Tensor) -> str:
        if self._session.parameters.slot(tensor) is not None:
            return "op=Adasum hands over parameters, not gradients, and cannot be compressed; use op=Average or op=Sum"
        return _SPARSE if self._session.parameters.any_sparse else _UNKNOWN


if TYPE_CHECKING:

    class CompressedOptimizer(torch.optim.Optimizer):
        """Horovod's own distributed optimizer, as type checkers see it: a subclass of the given one, with these members."""

        compression: Compression
        stats: Callable[[], dict[str, Any]]
        synchronize: Callable[[], None]
        skip_synchronize: Callable[[], Any]


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: str | Compressor = "topk",
    *,
    bucket_mb: float = 25,
    seed: int = 0,
    **stock_options: Any,
) -> CompressedOptimizer:
    """Make hvd.DistributedOptimizer with a spec for compression=, without carriers; .compression and .stats() are added to it.

    named_parameters: usually model.named_parameters(). compression: "name:knob=value", or a compressor.
    bucket_mb: the most that layers in one bucket have, in 10^6 bytes. seed: of what is drawn, the same on all ranks.
    stock_options: all of Horovod's are taken; groups and num_groups have nothing left to group, since gradcomp's buckets stand
    in for them.

    Horovod's class stays as it is; of this one object the method that reduces a gradient is replaced.
    """
    op = stock_options.get("op", hvd.Average)
    if op not in (hvd.Average, hvd.Sum):
        raise ValueError("only op=hvd.Average and op=hvd.Sum can be compressed, not Adasum, Min, Max or Product")
    if stock_options.get("sparse_as_dense"):
        raise ValueError(_SPARSE)
    stock_options.pop("groups", None)
    stock_options.pop("num_groups", None)
    named = named_of(optimizer, named_parameters)
    process_set = stock_options.get("process_set", hvd.global_process_set)
    own = Compression(compression, named, process_set=process_set, optimizer=optimizer, bucket_mb=bucket_mb, seed=seed)
    stock = hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=own, **stock_options)
    if list(inspect.signature(stock._allreduce_grad_async).parameters) == ["p"]:
        stock._allreduce_grad_async = _handing_over(own._session, process_set, op)
    else:
        warnings.warn(
            f"Horovod {horovod.__version__} is untested (supported: 0.22 to 0.28); falling back to the slower carrier route",
            stacklevel=2,
        )
    stock.compression = own
    stock.stats = own.stats
    return cast("CompressedOptimizer", stock)


def _handing_over(
    session: Session, process_set: hvd.ProcessSet, op: Any
) -> Callable[[Tensor], tuple[Callable[[], Tensor], None]]:
    """What stands in for the stock optimizer's allreduce of one gradient: Horovod calls what it returns for the result.

    Gradients are held until the ranks have met, in step(), the order of which is the same on all ranks.
    """

    def start(p: Tensor) -> tuple[Callable[[], Tensor], None]:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        if p.grad.is_sparse:
            raise ValueError(_SPARSE)
        session.mark_ready(session.slot(p), hold=True)

        def result() -> Tensor:
            session.finish_step(1.0 if op == hvd.Average else float(process_set.size()))
            assert p.grad is not None
            return p.grad

        return result, None

    return start


def __dir__() -> list[str]:
    return __all__
