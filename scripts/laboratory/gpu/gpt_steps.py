"""The time of a GPT's steps by each way to exchange gradients: python -m laboratory.gpu.gpt_steps --help. One rank of DDP.

With one rank nothing travels: a way costs what its hook costs. A way that fails leaves its error in its place.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import BuiltinCommHookType, TCPStore
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import gradcomp.ddp
from laboratory.gpu.job import NCCL
from laboratory.gpu.stages import attempt
from laboratory.harness.by_ddp import clipped

# Steps before those that count, steps timed one by one, and steps timed together.
WARM, TIMED, TOGETHER = 5, 15, 10


class Shape(NamedTuple):
    """The sizes of a GPT and its batch."""

    width: int
    layers: int
    heads: int
    words: int
    length: int
    batch: int


SHAPES = {"cuda": Shape(768, 12, 12, 50_304, 1024, 8), "cpu": Shape(32, 2, 2, 256, 16, 4)}

# Hooks of torch without a state: its own all-reduce, in Python, and one in half the bytes.
HOOKS = {"allreduce": default_hooks.allreduce_hook, "bf16": default_hooks.bf16_compress_hook}

# DDP and torch's hooks, and ten ways beside them. `ddp` comes once for each optimizer.
WAYS = {
    "adamw": [
        ("ddp", 25),
        ("bf16", 25),
        ("psgd1", 25),
        ("dense", 25),
        ("topk", 25),
        ("topk", 100),
        ("orq", 25),
        ("orq:levels=9", 25),
        ("bingrad", 25),
    ],
    "sgd": [("ddp", 25), ("sdagc", 25), ("sdagc", 100), ("gs_sgd", 25), ("gtopk", 25)],
}


class Gpt(nn.Module):
    """A GPT with tied embeddings. It returns the loss of each word's prediction by the words before it."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.words, self.places = nn.Embedding(shape.words, shape.width), nn.Embedding(shape.length, shape.width)
        options: Any = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        layers = (nn.TransformerEncoderLayer(shape.width, shape.heads, 4 * shape.width, **options) for _ in range(shape.layers))
        self.layers, self.norm = nn.ModuleList(layers), nn.LayerNorm(shape.width)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        hidden = self.words(x) + self.places.weight[: x.shape[1]]
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)  # then the mask itself is not read
        return cross_entropy((self.norm(hidden) @ self.words.weight.T).float().flatten(0, 1), y.flatten())


def exchanged(model: DistributedDataParallel, way: str, bucket_mb: int) -> None:
    """Give a model the exchange of a way."""
    if way in HOOKS:
        model.register_comm_hook(None, clipped(HOOKS[way]))
    elif way == "builtin":
        model._register_builtin_comm_hook(BuiltinCommHookType.ALLREDUCE)
    elif way == "psgd1":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif way != "ddp":
        gradcomp.ddp.attach(model, way, bucket_mb=bucket_mb)


def stepping(way: str, optimizer_name: str, bucket_mb: int, device: torch.device, shape: Shape) -> Callable[..., None]:
    """Make a model that is exchanged by a way. Return its step, which may set gradients to zero in place of None."""
    torch.manual_seed(0)
    with device:
        gpt, (x, y) = Gpt(shape), torch.randint(shape.words, (2, shape.batch, shape.length))
    model = DistributedDataParallel(gpt, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)
    optimizer: torch.optim.Optimizer
    if optimizer_name == "adamw":
        optimizer = torch.optim.AdamW(gpt.parameters(), 1e-4, fused=True)
    else:
        optimizer = torch.optim.SGD(gpt.parameters(), 0.01, momentum=0.9)
    exchanged(model, way, bucket_mb)

    def step(to_none: bool = True) -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(to_none)

    return step


def wait(device: torch.device) -> None:
    """Wait until a GPU has done its part."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds(step: Callable[[], object], count: int, device: torch.device) -> float:
    """Time so many steps together. Return the seconds of one."""
    wait(device)
    began = time.perf_counter()
    for _ in range(count):
        step()
    wait(device)
    return (time.perf_counter() - began) / count


def kernels(step: Callable[[], None]) -> dict[str, Any]:
    """Profile a step: time and number of all kernels, and of gradcomp's; time of NCCL's, which wait for other ranks."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    every = [event for event in profile.events() if event.device_type == torch.profiler.DeviceType.CUDA]
    own, waiting = ([event for event in every if name in event.name] for name in ("gradcomp", "nccl"))
    ms, own_ms, nccl_ms = (
        round(sum(event.time_range.elapsed_us() for event in events) / 1000, 2) for events in (every, own, waiting)
    )
    return {"gpu_ms": ms, "launches": len(every), "own_ms": own_ms, "own_launches": len(own), "nccl_ms": nccl_ms}


def measure(way: str, optimizer: str, bucket_mb: int, device: torch.device) -> dict[str, Any]:
    """Time the steps of a way."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    step = stepping(way, optimizer, bucket_mb, device, SHAPES[device.type])
    seconds(step, WARM, device)
    figures = {
        "step_ms": round(1000 * statistics.median(seconds(step, 1, device) for _ in range(TIMED)), 2),
        "free_running_ms": round(1000 * seconds(step, TOGETHER, device), 2),
    }
    return {**figures, **kernels(step), "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2)} if on_gpu else figures


def alone(device: torch.device) -> dict[str, Any]:
    """Join a group of this rank alone. Return a record's settings."""
    shape, backend = SHAPES[device.type], "nccl" if device.type == "cuda" else "gloo"
    os.environ.update(NCCL)
    dist.init_process_group(backend, store=TCPStore("127.0.0.1", 0, 1, is_master=True), rank=0, world_size=1)
    with torch.device("meta"):
        parameters = sum(each.numel() for each in Gpt(shape).parameters())
    return {
        "parameters": parameters,
        "ranks": 1,
        "door": f"ddp over {backend}",
        "batch": f"{shape.batch} x {shape.length:,} tokens",
        "autocast": "bfloat16",
    }


def main() -> None:
    """Measure every way. Write the record's settings and ways after each."""
    parser = argparse.ArgumentParser(prog="python -m laboratory.gpu.gpt_steps", description=__doc__)
    parser.add_argument("--device", choices=SHAPES, required=True)
    parser.add_argument("--out", type=Path, required=True, help="the record")
    options = parser.parse_args()
    device = torch.device(options.device, 0)
    found = {"settings": alone(device), "ways": []}
    for optimizer, each in WAYS.items():
        for way, bucket_mb in each:
            known = {"way": way, "optimizer": optimizer, "bucket_mb": bucket_mb}
            attempt(found, "ways", known, partial(measure, way, optimizer, bucket_mb, device), options.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
