"""Training through Horovod, by each way that it has."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

import gradcomp.horovod
from laboratory.harness import ways
from laboratory.harness.ways import Fitted


class Door:
    """The ranks of Horovod."""

    def __init__(self) -> None:
        hvd.init()
        self.rank, self.size = hvd.rank(), hvd.size()

    def means(self, own: list[float], name: str) -> list[float]:
        """Return the means of figures over the ranks."""
        mean = hvd.allreduce(torch.tensor(own, dtype=torch.float64), op=hvd.Average, name=name)
        return [float(figure) for figure in mean]

    def end(self) -> None:
        """Leave the ranks, when all of them are done: one that shuts down ends Horovod for the others."""
        hvd.barrier()
        hvd.shutdown()

    def fit(self, way: str, model: nn.Module, optimizer: Any, seed: int, clip: float) -> Fitted:
        """Fit a way to a model and its optimizer. The way is part of the names, so that Horovod's caches are not shared."""
        named = [(f"{way}.{name}", parameter) for name, parameter in model.named_parameters()]
        entries = sum(parameter.numel() for parameter in model.parameters())
        found = ways.other(way)
        if found is None:
            made = gradcomp.horovod.DistributedOptimizer(optimizer, named, compression=way, seed=seed)
            return Fitted(model, made, lambda: int(made.stats()["bytes_sent"]), made.stats)
        name, _ = found
        if name == "none":
            return Fitted(model, optimizer, lambda: 0)
        compression = hvd.Compression.fp16 if name == "fp16" else hvd.Compression.none
        made = hvd.DistributedOptimizer(optimizer, named, compression=compression)
        return Fitted(model, made, lambda: (2 if name == "fp16" else 4) * entries)
