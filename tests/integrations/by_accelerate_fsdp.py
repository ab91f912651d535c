"""Trains a small net by Accelerate and FSDP2 on these ranks: torchrun by_accelerate_fsdp.py FOLDER.

Accelerate takes FSDP2 on GPUs only, and its constructor decides that. So its state is told after it, and all else is its own.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin, __version__
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, ParallelismConfig
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy
from trainers import finish, net

import gradcomp.fsdp


def mesh_of() -> ParallelismConfig:
    """Make Accelerate's own configuration of two by two ranks, with a mesh of ours."""
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    names = ("dp_replicate", "dp_shard")
    config.device_mesh = mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    mesh[names]._flatten("dp")
    mesh["dp_shard"]._flatten("dp_shard_cp")
    mesh[names]._flatten("dp_cp")
    return config


def train(spec: str | None, is_hybrid: bool, steps: int = 8) -> dict[str, Any]:
    """is_hybrid: on a mesh of replicas and shards; otherwise all ranks have shards."""
    AcceleratorState._reset_state()  # of the training before
    accelerator = Accelerator(cpu=True)
    options: dict[str, Any] = {"auto_wrap_policy": "size_based_wrap", "min_num_params": 100, "cpu_ram_efficient_loading": False}
    state = accelerator.state
    state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, FullyShardedDataParallelPlugin(fsdp_version=2, **options)
    state.parallelism_config = mesh_of() if is_hybrid else None
    state.device_mesh = state.parallelism_config and state.parallelism_config.device_mesh
    model = net()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 0.01))
    handle = gradcomp.fsdp.attach(model, spec) if spec else None
    losses = []
    for step in range(steps):
        x = torch.randn(8, 20, generator=torch.Generator().manual_seed(4 * step + dist.get_rank()))
        loss = cross_entropy(model(x), x[:, :5].argmax(1))
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weights = torch.cat([each.detach().full_tensor().flatten() for each in model.parameters()])
    return {"weights": weights, "losses": losses, "exchanges": handle and handle.stats()["exchanges"]}


found: dict[str, Any] = {}
for spec in (None, "dense", "blocks"):
    found |= {f"shards {spec}": train(spec, False), f"hybrid {spec}": train(spec, True)}
finish(Path(sys.argv[1]), found, __version__)
