"""The doors to Horovod as tests compare them: an optimizer in Horovod alone, and with gradcomp by either of two ways."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from small_net import examples
from torch import Tensor, nn

import gradcomp

# Horovod without gradcomp; stock hvd.DistributedOptimizer(compression=Compression(...)); gradcomp's own DistributedOptimizer.
ALONE, COMPRESSION, OWN = "alone", "Compression", "DistributedOptimizer"
DOORS = (COMPRESSION, OWN)


def wrapped(
    door: str,
    optimizer: Any,
    named: list[tuple[str, nn.Parameter]],
    spec: Any = None,
    *,
    bucket_mb: float = 25,
    scaler: Any = None,
    given: bool = True,
    **options: Any,
) -> Any:
    """Wrap an optimizer for Horovod by one of the doors. given: pass it to Compression as optimizer=."""
    import horovod.torch as hvd

    if door == ALONE:
        return hvd.DistributedOptimizer(optimizer, named, **options)
    if door == OWN:
        return gradcomp.horovod.DistributedOptimizer(optimizer, named, spec, bucket_mb=bucket_mb, scaler=scaler, **options)
    checked = {"process_set": options["process_set"]} if "process_set" in options else {}
    checked |= {"optimizer": optimizer} if given else {}
    compression = gradcomp.horovod.Compression(spec, named, bucket_mb=bucket_mb, scaler=scaler, **checked)
    made = hvd.DistributedOptimizer(optimizer, named, compression=compression, **options)
    made.compression = compression
    return made


def named(model: nn.Module, prefix: str = "") -> list[tuple[str, nn.Parameter]]:
    """Name a model's parameters; two models at once need different prefixes."""
    return [(f"{prefix}{name}", parameter) for name, parameter in model.named_parameters()]


def sgd(
    door: str, model: nn.Module, spec: Any = None, *, prefix: str = "", lr: float = 0.02, momentum: float = 0, **options: Any
) -> Any:
    """Make an SGD optimizer of a model, wrapped by one of the doors."""
    return wrapped(door, torch.optim.SGD(model.parameters(), lr, momentum=momentum), named(model, prefix), spec, **options)


def batches(seed: int = 0, size: int = 8) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's batches without end."""
    import horovod.torch as hvd

    return examples(hvd.rank(), seed, size)
