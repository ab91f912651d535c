"""What Horovod's programs share: the ways of wrapping an optimizer, beside the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import horovod.torch as hvd
import torch
from model import Net, backward, examples, net, refused, train, weights
from torch import Tensor, nn

import gradcomp

__all__ = ["Net", "backward", "batches", "named", "net", "refused", "sgd", "train", "weights", "wrapped"]

STOCK, COMPRESSION, OWN = "hvd", "A", "B"  # Horovod alone; with compression=Compression(...); gradcomp's DistributedOptimizer
ROUTES = (COMPRESSION, OWN)


def wrapped(
    route: str,
    optimizer: Any,
    named: list[tuple[str, nn.Parameter]],
    spec: Any = None,
    *,
    bucket_mb: float = 25,
    **options: Any,
) -> Any:
    """The optimizer in Horovod's, along one of the routes."""
    if route == STOCK:
        return hvd.DistributedOptimizer(optimizer, named, **options)
    if route == OWN:
        return gradcomp.horovod.DistributedOptimizer(optimizer, named, spec, bucket_mb=bucket_mb, **options)
    checked = {"process_set": options["process_set"]} if "process_set" in options else {}
    compression = gradcomp.horovod.Compression(spec, named, optimizer=optimizer, bucket_mb=bucket_mb, **checked)
    made = hvd.DistributedOptimizer(optimizer, named, compression=compression, **options)
    made.compression = compression
    return made


def named(model: nn.Module, prefix: str = "") -> list[tuple[str, nn.Parameter]]:
    return [(f"{prefix}{name}", parameter) for name, parameter in model.named_parameters()]


def sgd(
    route: str, model: nn.Module, spec: Any = None, *, prefix: str = "", lr: float = 0.02, momentum: float = 0, **options: Any
) -> Any:
    return wrapped(route, torch.optim.SGD(model.parameters(), lr, momentum=momentum), named(model, prefix), spec, **options)


def batches(seed: int = 0, size: int = 8) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's examples."""
    return examples(hvd.rank(), seed, size)
