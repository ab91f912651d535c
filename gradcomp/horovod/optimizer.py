"""DistributedOptimizer: Horovod's optimizer, whose gradients are taken without carriers."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

import horovod.torch as hvd
import torch
from horovod.torch import optimizer as horovod_optimizer

from gradcomp.aliases import GradcompWarning
from gradcomp.core.compressor import Compressor
from gradcomp.engine.reducer import Stats
from gradcomp.engine.slots import named_of
from gradcomp.horovod.compression import CarrierFree, Compression, refused_op
from gradcomp.networks.horovod import version

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
    compression: str | Compressor = "blocks",
    *,
    scaler: torch.amp.GradScaler | None = None,
    bucket_mb: float | None = None,
    bucket_cap_mb: float | None = None,
    seed: int = 0,
    **stock_options: Any,
) -> CompressedOptimizer:
    """Make an hvd.DistributedOptimizer with compression. It is faster than one with Compression, if Horovod is 0.28.1.

    It replaces the method that reduces a gradient in this one object, and leaves Horovod's class unchanged.

    Args:
        optimizer: The one to wrap.
        named_parameters: Usually model.named_parameters(); Horovod's names by default.
        compression: "name:knob=value", a compressor, or "auto".
        scaler: The GradScaler, if one scales the loss. Only stats()["grad_norm"] needs it.
        bucket_mb: The largest size of a bucket, or bucket_cap_mb. See gradcomp.ddp.attach().
        seed: The seed of random draws, equal on all ranks.
        stock_options: Any other options of hvd.DistributedOptimizer. groups and num_groups have no effect, since gradcomp makes
            its own buckets. Sparse gradients are exchanged densely, with a warning unless sparse_as_dense=True.

    Returns:
        Horovod's optimizer, with two more members: .compression, the handle of the exchange, and .stats().

    Raises:
        ValueError: The spec or an option is wrong, or the op cannot be compressed.

    Example:
        >>> optimizer = gradcomp.horovod.DistributedOptimizer(optimizer, model.named_parameters(), "topk:ratio=0.01")
    """
    if hasattr(optimizer, "skip_synchronize"):
        raise ValueError("the optimizer is a hvd.DistributedOptimizer already; pass the one that it was made of")
    op = stock_options.get("op", hvd.Average)
    if op not in (hvd.Average, hvd.Sum):
        raise refused_op(op)
    stock_options.pop("groups", None)
    stock_options.pop("num_groups", None)
    named = named_of(optimizer, named_parameters)
    process_set = stock_options.get("process_set", hvd.global_process_set)
    options = {"process_set": process_set, "optimizer": optimizer, "scaler": scaler, "seed": seed}
    door = Compression(compression, named, bucket_mb=bucket_mb, bucket_cap_mb=bucket_cap_mb, **options)
    door._session.sums = op == hvd.Sum
    stock = hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=door, **stock_options)
    if carrier_free():
        reduction = CarrierFree(door._door, stock, bool(stock_options.get("sparse_as_dense")))
        door._session.door = door._door = reduction
        door._leaves = True  # what comes to compress() all the same
        stock._allreduce_grad_async = functools.partial(reduction.start, door)
    else:
        warnings.warn(
            f"Horovod {version()} is untested (tested: 0.28.1); falling back to the slower carrier route",
            GradcompWarning,
            stacklevel=2,
        )
    stock.compression = door
    stock.stats = door.stats
    return cast("CompressedOptimizer", stock)


def carrier_free() -> bool:
    """Say whether this version of Horovod has the method that DistributedOptimizer replaces."""
    reduction = getattr(horovod_optimizer._DistributedOptimizer, "_allreduce_grad_async", None)
    return reduction is not None and list(inspect.signature(reduction).parameters) == ["self", "p"]
