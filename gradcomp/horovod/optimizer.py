"""DistributedOptimizer: the stock optimizer, whose gradients are taken without carriers."""

from __future__ import annotations

import functools
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
from gradcomp.engine.optimizer_steps import warn_user
from gradcomp.engine.phases import Door
from gradcomp.engine.reducer import Stats
from gradcomp.engine.session import Session
from gradcomp.engine.slots import Slot, named_of
from gradcomp.horovod.compression import Compression
from gradcomp.networks.horovod import version

_DENSELY = (
    "the gradient of {name!r} is sparse, like those of torch.nn.Embedding(sparse=True). gradcomp exchanges it densely, like "
    "Horovod with sparse_as_dense=True: pass that, or use sparse=False, and this warning goes"
)

if TYPE_CHECKING:

    class CompressedOptimizer(torch.optim.Optimizer):
        """The type of Horovod's distributed optimizer: a subclass of the given optimizer's class, with these members."""

        compression: Compression
        stats: Callable[[], Stats]
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
    """Make a stock hvd.DistributedOptimizer with compression, without carriers unless this version of Horovod is untested.

    The method that reduces a gradient is replaced in this one object. Horovod's class is not changed.

    Args:
        optimizer: The one to wrap; its learning rates are used, and its momentum is taken over.
        named_parameters: Usually model.named_parameters(); Horovod's names by default.
        compression: "name:knob=value", a compressor, or "auto".
        scaler: The GradScaler that scales the loss, if one does.
        bucket_mb: The largest size of a bucket of several layers, in 10^6 bytes.
        seed: The seed of random draws, equal on all ranks.
        stock_options: Any other options of hvd.DistributedOptimizer. groups and num_groups have no effect, since gradcomp makes
            its own buckets. Sparse gradients are exchanged densely, with a warning unless sparse_as_dense=True.

    Returns:
        Horovod's optimizer. It has .compression, the handle of the exchange, and .stats() added.

    Raises:
        ValueError: The spec or an option is wrong, or the op cannot be compressed.

    Example:
        >>> optimizer = gradcomp.horovod.DistributedOptimizer(optimizer, model.named_parameters(), "topk:ratio=0.01")
    """
    if hasattr(optimizer, "skip_synchronize"):
        raise ValueError("the optimizer is a hvd.DistributedOptimizer already; pass the one that it was made of")
    op = stock_options.get("op", hvd.Average)
    if op not in (hvd.Average, hvd.Sum):
        name = next((name for name in ("Adasum", "Min", "Max", "Product") if getattr(hvd, name, None) == op), op)
        raise ValueError(f"op={name} cannot be compressed; use op=Average or op=Sum")
    stock_options.pop("groups", None)
    stock_options.pop("num_groups", None)
    named = named_of(optimizer, named_parameters)
    process_set = stock_options.get("process_set", hvd.global_process_set)
    options = {"process_set": process_set, "optimizer": optimizer, "scaler": scaler, "bucket_mb": bucket_mb, "seed": seed}
    door = Compression(compression, named, **options)
    if op == hvd.Sum:
        door._session.view.sums = True
    stock = hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=door, **stock_options)
    if carrier_free():
        scale = 1.0 if op == hvd.Average else float(process_set.size())
        door._session.door = reduction = _CarrierFree(door._session.door, stock, bool(stock_options.get("sparse_as_dense")))
        stock._allreduce_grad_async = functools.partial(reduction.start, door._session, scale)
    else:
        warnings.warn(
            f"Horovod {version()} is untested (tested: 0.28.1); falling back to the slower carrier route",
            stacklevel=2,
        )
    door._session.view.note_optimizer(stock, door._session.compressor)  # it is another object than the one that it was made of
    stock.compression = door
    stock.stats = door.stats
    return cast("CompressedOptimizer", stock)


def carrier_free() -> bool:
    """Say whether this version of Horovod has the method that DistributedOptimizer replaces."""
    reduction = getattr(horovod_optimizer._DistributedOptimizer, "_allreduce_grad_async", None)
    return reduction is not None and list(inspect.signature(reduction).parameters) == ["self", "p"]


class _CarrierFree(Door):
    """The door without carriers: it takes the place of the stock optimizer's reduction of one gradient.

    Gradients are held until the ranks have met in step(), since steps have the same order on all ranks. The method that is
    replaced still reduces gradients that are not worth compressing.

    sparse_as_dense: the user knows that sparse gradients are exchanged densely.
    """

    def __init__(self, door: Door, optimizer: Any, sparse_as_dense: bool):
        super().__init__(**vars(door) | {"holds": True})
        self._optimizer = weakref.ref(optimizer)  # which has the session
        self._begun: dict[Tensor, int] = {}
        self._sparse_as_dense = sparse_as_dense

    def start(self, session: Session, scale: float, p: Tensor) -> tuple[Callable[[], Tensor], None]:
        """Start the reduction of a gradient. Return a function that waits for it. scale: the op's result over the mean."""
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        slot = session.slot(p)
        if p.grad.is_sparse:
            p.grad = p.grad.to_dense()
            if not self._sparse_as_dense:
                self._sparse_as_dense = True  # said
                warn_user(_DENSELY.format(name=slot.name))
        session.ready(slot)
        return functools.partial(self._finish, session, scale, p), None

    def _finish(self, session: Session, scale: float, p: Tensor) -> Tensor:
        session.finish(scale)
        if session.stock is not None:
            update = cast("Tensor", hvd.synchronize(self._begun.pop(p)))
        else:
            self._begun.clear()  # a failed step left them
            assert p.grad is not None
            update = p.grad
        if isinstance(self._optimizer(), torch.optim.SparseAdam):  # it takes no dense gradients
            p.grad = update.to_sparse()  # Horovod writes the update there
        return update

    def start_stock_allreduce(self, slot: Slot) -> None:
        optimizer, parameter = self._optimizer(), slot.parameter
        assert optimizer is not None and parameter is not None
        self._begun[parameter] = type(optimizer)._allreduce_grad_async(optimizer, parameter)[0]
