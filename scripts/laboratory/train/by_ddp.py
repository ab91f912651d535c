"""Training through DistributedDataParallel, by each way that it has."""

# No `from __future__ import annotations` here: it makes annotations strings, and torch compares a hook's with types.

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import gradcomp
from gradcomp.networks.torch import TorchNetwork
from laboratory.train import ways
from laboratory.train.trainee import Fitted

# The hook starts later reductions of a bucket from gloo's threads. With several buckets their order differs between ranks, and
# gloo adds up tensors of different buckets, or aborts. So it gets one bucket, of up to so many megabytes.
ONE_BUCKET = 1e4


class Door:
    """The ranks of torch.distributed, on gloo."""

    name = ways.DDP

    def __init__(self) -> None:
        dist.init_process_group("gloo", timeout=timedelta(minutes=10))
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def means(self, own: list[float], name: str) -> list[float]:
        """Return the means of figures over the ranks."""
        mean = torch.tensor(own, dtype=torch.float64)
        dist.all_reduce(mean)
        return [float(figure) / self.size for figure in mean]

    def network(self) -> TorchNetwork:
        """Return the network that gradcomp has."""
        return TorchNetwork(dist.distributed_c10d._get_default_group(), torch.device("cpu"))

    def end(self) -> None:
        """Leave the ranks, when all of them are done."""
        dist.barrier()
        dist.destroy_process_group()

    def fit(self, way: str, model: nn.Module, optimizer: Any, seed: int) -> Fitted:
        """Fit a way to a model and its optimizer."""
        entries = sum(parameter.numel() for parameter in model.parameters())
        found = ways.other(way)
        if found is None:
            wrapped = DistributedDataParallel(model)
            handle = gradcomp.ddp.attach(wrapped, way, optimizer=optimizer, seed=seed)
            return Fitted(wrapped, optimizer, lambda: int(handle.stats()["bytes_sent"]), handle.stats)
        name, number = found
        if name == "none":
            return Fitted(model, optimizer, lambda: 0)
        if name == "sync":
            return Fitted(model, Synced(optimizer), lambda: 0)
        wrapped = DistributedDataParallel(model, bucket_cap_mb=ONE_BUCKET if name == "powersgd" else None)
        if name == "powersgd":
            state = powerSGD_hook.PowerSGDState(
                dist.group.WORLD, matrix_approximation_rank=int(number), start_powerSGD_iter=ways.POWERSGD_FROM
            )
            wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
            return Fitted(wrapped, optimizer, lambda: None)
        if name in _HALVES:
            wrapped.register_comm_hook(None, _HALVES[name])
        return Fitted(wrapped, optimizer, lambda: (2 if name in _HALVES else 4) * entries // int(number))


class Synced:
    """An optimizer whose step ends with one number that the ranks reduce."""

    def __init__(self, optimizer: Any):
        self._optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def step(self) -> None:
        """Step, and wait for the others."""
        self._optimizer.step()
        dist.all_reduce(torch.zeros(1))


# DistributedDataParallel knows these hooks by name and refuses them on gloo, which can reduce both types.
def _bf16(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    return default_hooks.bf16_compress_hook(None, bucket)  # type: ignore[arg-type]


def _fp16(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    return default_hooks.fp16_compress_hook(None, bucket)  # type: ignore[arg-type]


_HALVES = {"bf16": _bf16, "fp16": _fp16}
