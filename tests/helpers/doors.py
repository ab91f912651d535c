"""The doors to gradcomp as tests compare them: DDP, two for Horovod, and Horovod alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import ranks
import small_net
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
    if door == DDP:
        return dist.get_rank()
    import horovod.torch as hvd

    return hvd.rank()


def wrapped(
    door: str,
    optimizer: Any,
    named: list[tuple[str, nn.Parameter]],
    spec: Any = None,
    *,
    bucket_mb: float = 25,
    scaler: Any = None,
    seed: int = 0,
    given: bool = True,
    **options: Any,
) -> Any:
    """Wrap an optimizer for Horovod by one of the doors. given: pass it to Compression as optimizer=."""
    import horovod.torch as hvd

    if door == ALONE:
        return hvd.DistributedOptimizer(optimizer, named, **options)
    ours: dict[str, Any] = {"bucket_mb": bucket_mb, "scaler": scaler, "seed": seed}
    if door == OWN:
        return gradcomp.horovod.DistributedOptimizer(optimizer, named, spec, **ours, **options)
    ours |= {"process_set": options["process_set"]} if "process_set" in options else {}
    ours |= {"optimizer": optimizer} if given else {}
    compression = gradcomp.horovod.Compression(spec, named, **ours)
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
    """A model in training by a door, or without gradcomp where there is no spec. handle: of its session."""

    _made = itertools.count()

    def __init__(
        self, door: str, model: nn.Module | None = None, spec: Any = None, *, prefix: str | None = None, **options: Any
    ):
        """Wrap inner=, an optimizer of the model, or an SGD with lr= and momentum=.

        prefix: of the parameters' names under Horovod; by default none, and for later trainings their number. options: others
        for gradcomp, for Horovod's optimizer, or for DistributedDataParallel.
        """
        self.model: Any = small_net.net() if model is None else model
        self.door, self.whole = door, self.model
        settings = {name: options.pop(name) for name in ("lr", "momentum") if name in options}
        inner = options.pop("inner", None) or torch.optim.SGD(self.model.parameters(), **{"lr": 0.02, **settings})
        if door == DDP:
            self.optimizer, self.prefix = inner, ""
            ours = {name: options.pop(name) for name in ("scaler", "seed", "bucket_mb") if name in options}
            given = inner if options.pop("given", True) else None
            self.whole = DistributedDataParallel(self.model, bucket_cap_mb=ours.get("bucket_mb", 25), **options)
            self.handle: Any = None if spec is None else gradcomp.ddp.attach(self.whole, spec, optimizer=given, **ours)
        else:
            number = next(self._made)
            self.prefix = prefix if prefix is not None else f"{number}." if number else ""
            self.optimizer = wrapped(door, inner, named(self.model, self.prefix), spec, **options)
            self.handle = None if door == ALONE else self.optimizer.compression
        self.data = examples(rank(door))

    def backward(self, **options: Any) -> None:
        """Run the next batch forward and backward."""
        small_net.backward(self.whole, next(self.data), **options)

    def train(self, steps: int, skip: Callable[[int], bool] = lambda step: False) -> Tensor:
        """Take steps, of which some skip a layer of the small net. Return the weights."""
        for step in range(steps):
            self.optimizer.zero_grad()
            self.backward(**({"skip": True} if skip(step) else {}))
            self.optimizer.step()
        return self.weights

    @property
    def weights(self) -> Tensor:
        return small_net.weights(self.model)

    def residual(self) -> dict[str, Tensor]:
        """Return the residual by the names of the model's parameters."""
        return {name.removeprefix(self.prefix): left for name, left in self.handle.residual().items()}

    def apply(self, scaling: Any, unscales: bool = True) -> None:
        """Finish a step under a GradScaler, as Horovod's and torch's documentation say."""
        if self.door == DDP:
            scaling.step(self.optimizer)
        else:
            self.optimizer.synchronize()
            if unscales:
                scaling.unscale_(self.optimizer)
            with self.optimizer.skip_synchronize():
                scaling.step(self.optimizer)
        scaling.update()
