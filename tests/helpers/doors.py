"""The doors to gradcomp as tests compare them: DDP, two for Horovod, and Horovod alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ranks
import torch
import torch.distributed as dist
from small_net import examples
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradcomp

# Horovod without gradcomp; stock hvd.DistributedOptimizer(compression=Compression(...)); gradcomp's own DistributedOptimizer.
ALONE, COMPRESSION, OWN = "alone", "Compression", "DistributedOptimizer"
DOORS = (COMPRESSION, OWN)
DDP = "ddp"
EVERY = (DDP, *DOORS)


def join(door: str) -> None:
    """Make torch's group of these ranks, or Horovod's."""
    import horovod.torch as hvd

    (ranks.join if door == DDP else hvd.init)()


def rank(door: str) -> int:
    import horovod.torch as hvd

    return dist.get_rank() if door == DDP else hvd.rank()


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


class Training:
    """A model in training by a door, with the handle that its session has."""

    def __init__(
        self, door: str, model: nn.Module, spec: Any, *, prefix: str = "", lr: float = 0.02, momentum: float = 0, **options: Any
    ):
        """Wrap inner=, an optimizer of the model, or an SGD with these settings."""
        self.model, self._is_ddp = model, door == DDP
        self.whole: Any = model
        inner = options.pop("inner", None) or torch.optim.SGD(model.parameters(), lr, momentum=momentum)
        if door == DDP:
            self.optimizer: Any = inner
            self.whole = DistributedDataParallel(model, bucket_cap_mb=options.get("bucket_mb", 25))
            options["optimizer"] = inner if options.pop("given", True) else None
            self.handle: Any = None if spec is None else gradcomp.ddp.attach(self.whole, spec, **options)
        else:
            self.optimizer = wrapped(door, inner, named(model, prefix), spec, **options)
            self.handle = self.optimizer.compression

    def apply(self, scaling: Any, unscales: bool = True) -> None:
        """Finish a step under a GradScaler, as Horovod's and torch's documentation say."""
        if self._is_ddp:
            scaling.step(self.optimizer)
        else:
            self.optimizer.synchronize()
            if unscales:
                scaling.unscale_(self.optimizer)
            with self.optimizer.skip_synchronize():
                scaling.step(self.optimizer)
        scaling.update()
