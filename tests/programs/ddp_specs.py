"""Trains a DDP model with each spec, and a plain one with what the simulator makes of all ranks' gradients."""

from __future__ import annotations

from typing import Any

import model
import ranks
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradcomp

BUCKET_MB = 0.02
STEPS = 8


def steps(optimizer: torch.optim.Optimizer, gradients: Any) -> None:
    """With a learning rate that falls."""
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 0.02 / (1 + step // 3)
        optimizer.zero_grad()
        gradients()
        optimizer.step()


def trained(spec: str) -> dict[str, Any]:
    """DDP's own buckets are as small as gradcomp's, and are others."""
    plain, data = model.net(), model.examples(dist.get_rank())
    optimizer = torch.optim.SGD(plain.parameters(), 0.02)
    whole = DistributedDataParallel(plain, bucket_cap_mb=BUCKET_MB)
    handle = gradcomp.ddp.attach(whole, spec, optimizer=optimizer, bucket_mb=BUCKET_MB)
    steps(optimizer, lambda: model.backward(whole, next(data)))
    return {"weights": model.weights(plain), "stats": handle.stats()}


def simulated(spec: str) -> dict[str, Any]:
    size = dist.get_world_size()
    plain, data = model.net(), [model.examples(rank) for rank in range(size)]
    optimizer = torch.optim.SGD(plain.parameters(), 0.02)
    shapes = {name: tuple(parameter.shape) for name, parameter in plain.named_parameters()}
    simulation = gradcomp.Simulation(spec, shapes, size, bucket_mb=BUCKET_MB)

    def gradients() -> None:
        found = []
        for own in data:
            optimizer.zero_grad()
            model.backward(plain, next(own))
            found.append({name: parameter.grad for name, parameter in plain.named_parameters()})
        update = simulation.step(found)
        for name, parameter in plain.named_parameters():
            parameter.grad = update[name]

    steps(optimizer, gradients)
    return {"weights": model.weights(plain), "bytes": simulation.bytes_sent[dist.get_rank()]}


ranks.join()
ranks.report({spec: (trained(spec), simulated(spec) if compare else None) for spec, compare in ranks.arguments()})
dist.destroy_process_group()
