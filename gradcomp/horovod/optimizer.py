"""DistributedOptimizer: the stock optimizer, whose gradients are taken without carriers."""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

import horovod.torch as hvd
import torch
from horovod.torch import optimizer as horovod_optimizer
from torch import Tensor

from gradcomp.core.compressor import Compressor
from gradcomp.engine.parameters import Slot, named_of
from gradcomp.engine.sessions.session import Session
from gradcomp.horovod.compression import SPARSE, Compression
from gradcomp.networks.horovod import version

if TYPE_CHECKING:

    class CompressedOptimizer(torch.optim.Optimizer):
        """The type of Horovod's distributed optimizer: a subclass of the given optimizer's class, with these members."""

        compression: Compression
        stats: Callable[[], dict[str, Any]]
        synchronize: Callable[[], None]
        skip_synchronize: Callable[[], Any]


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: str | Compressor = "topk",
    *,
    scaler: torch.amp.GradScaler | None = None,
    bucket_mb: float = 25,
    seed: int = 0,
    **stock_options: Any,
) -> CompressedOptimizer:
    """Make a stock hvd.DistributedOptimizer with compression. It has .compression and .stats() added.

    It sends no carriers unless this version of Horovod is untested.

    optimizer: the one to wrap; its learning rates are used, and its momentum is taken over.
    named_parameters: usually model.named_parameters(); Horovod's names by default.
    compression: "name:knob=value", a compressor, or "auto"; "topk" by default.
    scaler: the GradScaler that scales the loss, if one does.
    bucket_mb: the largest size of a bucket of several layers, in 10^6 bytes; 25 by default.
    seed: the seed of random draws, equal on all ranks; 0 by default.
    stock_options: any other options of hvd.DistributedOptimizer. groups and num_groups have no effect, since gradcomp makes its
    own buckets.

    The method that reduces a gradient is replaced in this one object. Horovod's class is not changed.
    """
    if hasattr(optimizer, "skip_synchronize"):
        raise ValueError("the optimizer is a hvd.DistributedOptimizer already; pass the one that it was made of")
    op = stock_options.get("op", hvd.Average)
    if op not in (hvd.Average, hvd.Sum):
        name = next((name for name in ("Adasum", "Min", "Max", "Product") if getattr(hvd, name, None) == op), op)
        raise ValueError(f"op={name} cannot be compressed; use op=Average or op=Sum")
    if stock_options.get("sparse_as_dense"):
        raise ValueError(SPARSE)
    stock_options.pop("groups", None)
    stock_options.pop("num_groups", None)
    named = named_of(optimizer, named_parameters)
    process_set = stock_options.get("process_set", hvd.global_process_set)
    options = {"process_set": process_set, "optimizer": optimizer, "scaler": scaler, "bucket_mb": bucket_mb, "seed": seed}
    door = Compression(compression, named, **options)
    if op == hvd.Sum:
        door._session.note_sums()
    stock = hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=door, **stock_options)
    if carrier_free():
        stock._allreduce_grad_async = _carrier_free_reduction(door._session, process_set, op, stock)
    else:
        warnings.warn(
            f"Horovod {version()} is untested (tested: 0.28.1); falling back to the slower carrier route",
            stacklevel=2,
        )
    door._session.training.note_optimizer(stock)  # it is another object than the one that it was made of
    stock.compression = door
    stock.stats = door.stats
    return cast("CompressedOptimizer", stock)


def carrier_free() -> bool:
    """Say whether this version of Horovod has the method that DistributedOptimizer replaces."""
    reduction = getattr(horovod_optimizer._DistributedOptimizer, "_allreduce_grad_async", None)
    return reduction is not None and list(inspect.signature(reduction).parameters) == ["self", "p"]


def _carrier_free_reduction(
    session: Session, process_set: hvd.ProcessSet, op: Any, stock: Any
) -> Callable[[Tensor], tuple[Callable[[], Tensor], None]]:
    """Make a replacement for the stock optimizer's reduction of one gradient. It returns a function for the result.

    Gradients are held until the ranks have met in step(), since steps have the same order on all ranks. stock: the
    optimizer. The method that is replaced still reduces gradients that are not worth compressing.
    """

    begun: dict[Tensor, int] = {}
    own = weakref.ref(stock)  # the optimizer has the session

    def by_stock(slot: Slot) -> None:
        optimizer = own()
        assert optimizer is not None
        begun[slot.parameter] = type(optimizer)._allreduce_grad_async(optimizer, slot.parameter)[0]

    def start(p: Tensor) -> tuple[Callable[[], Tensor], None]:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        if p.grad.is_sparse:
            raise session.failed(ValueError(SPARSE))
        session.mark_ready(session.slot(p), hold=True)

        def result() -> Tensor:
            session.finish_step(1.0 if op == hvd.Average else float(process_set.size()))
            if session.stock is not None:
                return cast("Tensor", hvd.synchronize(begun.pop(p)))
            begun.clear()  # what a failed step left
            assert p.grad is not None
            return p.grad

        return result, None

    session.by_stock = by_stock
    return start
