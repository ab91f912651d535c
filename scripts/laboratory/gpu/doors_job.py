"""A rank of gpu_check under torchrun: FSDP2, a compiled DDP model and a GradScaler, without and with gradcomp."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradcomp.ddp
import gradcomp.fsdp
from gradcomp.networks.replicas import NAME
from laboratory.gpu import steps
from laboratory.gpu.ddp_job import agree, run

# The specs of each kind: those that must give the weights of torch alone, which is the first; those that must but for rounding;
# and others.
LIKE, NEAR, OTHERS = ["none", "dense"], [steps.EXACT], [steps.SPARSE]
KINDS = {
    "FSDP2 over shards": (LIKE, [], ["blocks"]),
    "FSDP2 over replicas": ([*LIKE, *NEAR], [], OTHERS),
    "compiled": (LIKE, NEAR, OTHERS),
    "scaled": (LIKE, NEAR, OTHERS),
}


class UnderAutocast(nn.Module):
    """A model that computes in half precision: float16 on a GPU, bfloat16 on a CPU."""

    def __init__(self, inside: nn.Module, device: str):
        super().__init__()
        self.inside, self._device = inside, device

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(self._device, torch.float16 if self._device == "cuda" else torch.bfloat16):
            result: Tensor = self.inside(x)
        return result.float()


class Scaled:
    """An optimizer with a GradScaler, for steps.train."""

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler):
        self._optimizer, self._scaler = optimizer, scaler
        self.zero_grad, self.scale = optimizer.zero_grad, scaler.scale

    def step(self) -> None:
        """Make a step, unless a gradient has overflowed."""
        self._scaler.step(self._optimizer)
        self._scaler.update()


def by_fsdp(kind: str, device: str, spec: str, model: nn.Module) -> tuple[nn.Module, Any]:
    """Give every layer to FSDP2: sharded over the ranks, or whole on each, with gradcomp's backend for the all-reduce."""
    replicas = dist.get_world_size() if "replicas" in kind else 1
    names, shape = ("replicate", "shard"), (replicas, dist.get_world_size() // replicas)
    override: Any = {} if spec == "none" else {"replicate": NAME}
    mesh = init_device_mesh(device, shape, mesh_dim_names=names, backend_override=override)
    layers = [layer for layer in model.children() if any(True for _ in layer.parameters())]
    for part in (*layers, model):
        fully_shard(part, mesh=mesh if replicas > 1 else mesh["shard"])
    if spec != "none":
        gradcomp.fsdp.attach(model, spec)
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def by_ddp(kind: str, device: str, spec: str, model: nn.Module) -> tuple[nn.Module, Any]:
    """Wrap a model in DDP, compiled or with a GradScaler."""
    wrapped = DistributedDataParallel(UnderAutocast(model, device) if kind == "scaled" else model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler(device, init_scale=1024.0) if kind == "scaled" else None
    if spec != "none":
        gradcomp.ddp.attach(wrapped, spec)
    if scaler:
        return wrapped, Scaled(optimizer, scaler)
    return torch.compile(wrapped, backend="inductor" if device == "cuda" else "eager"), optimizer  # type: ignore[return-value]


def compared(options: argparse.Namespace) -> dict[str, Any]:
    """Train by every kind under every spec."""
    checks: dict[str, bool] = {}
    for kind, every in KINDS.items():

        def make(way: str, model: nn.Module) -> tuple[nn.Module, Any]:
            kind, _, spec = way.partition(", ")
            return (by_fsdp if "FSDP2" in kind else by_ddp)(kind, options.device, spec, model)

        like, near, others = ([f"{kind}, {spec}" for spec in specs] for specs in every)
        checks |= steps.compare([*like, *near, *others], like, make, agree, options, dist.get_rank(), near)["checks"]
    return {"width": options.width, "steps": steps.STEPS, "checks": checks}


if __name__ == "__main__":
    run(__doc__, compared)
