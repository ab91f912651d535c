"""Training through Horovod, by each way that it has."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

import gradcomp.horovod
from gradcomp.networks.horovod import HorovodNetwork
from laboratory.train import projects, ways
from laboratory.train.trainee import Fitted


class Door:
    """The ranks of Horovod."""

    name = ways.HOROVOD

    def __init__(self) -> None:
        hvd.init()
        self.rank, self.size = hvd.rank(), hvd.size()

    def means(self, own: list[float], name: str) -> list[float]:
        """Return the means of figures over the ranks."""
        mean = hvd.allreduce(torch.tensor(own, dtype=torch.float64), op=hvd.Average, name=name)
        return [float(figure) for figure in mean]

    def network(self) -> HorovodNetwork:
        """Return the network that gradcomp has."""
        return HorovodNetwork(hvd.global_process_set)

    def end(self) -> None:
        """Leave the ranks, when all of them are done: one that shuts down ends Horovod for the others."""
        hvd.barrier()
        hvd.shutdown()

    def fit(self, way: str, model: nn.Module, optimizer: Any, seed: int) -> Fitted:
        """Fit a way to a model and its optimizer. The way is part of the names, so that Horovod's caches are not shared."""
        named = [(f"{way}.{name}", parameter) for name, parameter in model.named_parameters()]
        entries = sum(parameter.numel() for parameter in model.parameters())
        found = ways.other(way)
        if found is None:
            made = gradcomp.horovod.DistributedOptimizer(optimizer, named, compression=way, seed=seed)
            return Fitted(model, made, lambda: int(made.stats()["bytes_sent"]), made.stats)
        name, number = found
        if name == "none":
            return Fitted(model, optimizer, lambda: 0)
        if name == "sync":
            return Fitted(model, Synced(optimizer), lambda: 0)
        if name == "grace":
            return Fitted(model, projects.grace(optimizer, named, number), lambda: None)
        if name == "dgc":
            return Fitted(model, projects.dgc(optimizer, named, number), lambda: None)
        compression = hvd.Compression.fp16 if name == "fp16" else hvd.Compression.none
        made = hvd.DistributedOptimizer(optimizer, named, compression=compression)
        return Fitted(model, made, lambda: (2 if name == "fp16" else 4) * entries)


class Synced:
    """An optimizer whose step ends with one number that the ranks reduce."""

    def __init__(self, optimizer: Any):
        self._optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def step(self) -> None:
        """Step, and wait for the others."""
        self._optimizer.step()
        hvd.allreduce_(torch.zeros(1), name="sync")
