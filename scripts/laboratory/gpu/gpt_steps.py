"""The time of a GPT's steps by each way to exchange gradients: python -m laboratory.gpu.gpt_steps --help. One rank of DDP.

With one rank nothing travels: a way costs what its hook costs. A way that fails leaves its error in its place.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import gradcomp.ddp
from laboratory.gpu.job import NCCL

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


SHAPES = {"cuda": Shape(768, 12, 12, 50_304, 1024, 8), "cpu": Shape(32, 2, 2, 128, 16, 2)}

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
    if way == "bf16":
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    elif way == "psgd1":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif way != "ddp":
        gradcomp.ddp.attach(model, way, bucket_mb=bucket_mb)


def stepping(way: str, optimizer_name: str, bucket_mb: int, device: torch.device, shape: Shape) -> Callable[[], None]:
    """Make a model that is exchanged by a way. Return its step."""
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

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def kernels(step: Callable[[], None]) -> dict[str, Any]:
    """Profile a step: time and number of all kernels, and of gradcomp's."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    every = [event for event in profile.events() if event.device_type == torch.profiler.DeviceType.CUDA]
    own = [event for event in every if "gradcomp" in event.name]
    all_ms, own_ms = (round(sum(event.time_range.elapsed_us() for event in events) / 1000, 2) for events in (every, own))
    return {"gpu_ms": all_ms, "launches": len(every), "own_ms": own_ms, "own_launches": len(own)}


def measure(way: str, optimizer: str, bucket_mb: int, device: torch.device) -> dict[str, Any]:
    """Time the steps of a way."""
    on_gpu = device.type == "cuda"
    wait: Callable[[], Any] = torch.cuda.synchronize if on_gpu else lambda: None
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    step = stepping(way, optimizer, bucket_mb, device, SHAPES[device.type])

    def seconds(count: int) -> float:
        wait()
        began = time.perf_counter()
        for _ in range(count):
            step()
        wait()
        return (time.perf_counter() - began) / count

    seconds(WARM)
    figures = {
        "step_ms": round(1000 * statistics.median(seconds(1) for _ in range(TIMED)), 2),
        "free_running_ms": round(1000 * seconds(TOGETHER), 2),
    }
    return {**figures, **kernels(step), "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2)} if on_gpu else figures


def main() -> None:
    """Measure every way, and print the record's settings and ways."""
    parser = argparse.ArgumentParser(prog="python -m laboratory.gpu.gpt_steps", description=__doc__)
    parser.add_argument("--device", choices=SHAPES, required=True)
    device = torch.device(parser.parse_args().device, 0)
    shape, backend = SHAPES[device.type], "nccl" if device.type == "cuda" else "gloo"
    os.environ.update(NCCL)
    dist.init_process_group(backend, store=TCPStore("127.0.0.1", 0, 1, is_master=True), rank=0, world_size=1)
    with torch.device("meta"):
        parameters = sum(each.numel() for each in Gpt(shape).parameters())
    settings = {
        "parameters": parameters,
        "ranks": 1,
        "door": f"ddp over {backend}",
        "batch": f"{shape.batch} x {shape.length:,} tokens",
        "autocast": "bfloat16",
    }
    ways = []
    for optimizer, each in WAYS.items():
        for way, bucket_mb in each:
            if way == "bf16" and backend != "nccl":  # torch refuses this hook
                continue
            known = {"way": way, "optimizer": optimizer, "bucket_mb": bucket_mb}
            try:
                ways.append({**known, **measure(way, optimizer, bucket_mb, device)})
            except Exception as error:  # the other ways have their turn
                ways.append({**known, "error": f"{type(error).__name__}: {error}"})
            print(json.dumps(ways[-1]), flush=True)
    print("@" + json.dumps({"settings": settings, "ways": ways}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
