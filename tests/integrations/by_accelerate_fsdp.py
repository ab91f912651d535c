"""Trains a small net by Accelerate and FSDP2 on four ranks: torchrun by_accelerate_fsdp.py FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin, __version__
from accelerate.state import AcceleratorState
from accelerate.utils import ParallelismConfig
from torch.nn.functional import cross_entropy
from trainers import finish, net, take_cpus_for_gpus

import gradcomp.fsdp

folder = Path(sys.argv[1])
SIZES: dict[str, dict[str, int]] = {"shards": {"dp_shard_size": 4}, "hybrid": {"dp_replicate_size": 2, "dp_shard_size": 2}}
STEPS = 8


def train(name: str, mesh: str, spec: str | None, weights: str | None = None, resumes: str | None = None) -> dict[str, Any]:
    """Train, and save in mid-training, or go on from what another training saved there."""
    AcceleratorState._reset_state(reset_partial_state=True)  # of the training before
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=100)
    accelerator = Accelerator(fsdp_plugin=plugin, parallelism_config=ParallelismConfig(**SIZES[mesh]))
    model = net(256)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 0.01))
    handle = gradcomp.fsdp.attach(model, spec, weights=weights) if spec else None
    if resumes:
        accelerator.load_state(str(folder / resumes))
    losses, norms = [], []
    for step in range(STEPS // 2 if resumes else 0, STEPS):
        x = torch.randn(8, 20, generator=torch.Generator().manual_seed(4 * step + dist.get_rank()))
        loss = cross_entropy(model(x), x[:, :5].argmax(1))
        accelerator.backward(loss)
        norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).full_tensor().item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == STEPS // 2 - 1:
            accelerator.save_state(str(folder / name))
    found = torch.cat([each.detach().full_tensor().flatten() for each in model.parameters()])
    return {"weights": found, "losses": losses, "norms": norms, "stats": handle and handle.stats()}


take_cpus_for_gpus()
found: dict[str, Any] = {}
for mesh in SIZES:
    for spec in (None, "dense", "blocks"):
        found[f"{mesh} {spec}"] = train(f"{mesh}-{spec}", mesh, spec)
    found[f"{mesh} gathered"] = train(f"{mesh}-gathered", mesh, "blocks", "blocks:bits=8")
    found[f"{mesh} resumed"] = train("again", mesh, "blocks", "blocks:bits=8", f"{mesh}-gathered")
found["hybrid topk"] = train("topk", "hybrid", "topk:ratio=0.1", "blocks:bits=8")
finish(folder, found, __version__)
