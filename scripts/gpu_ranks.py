"""What the two ranks of gpu_check run: stock Horovod on one device, dense and compressed, compared bit for bit and timed."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import digits
import horovod.torch as hvd
import torch
from gpulib import trace
from torch import Tensor
from torch.nn.functional import cross_entropy

import gradcomp.horovod

STEPS, BATCH = 20, 64
SPECS = ["horovod", "dense", "topk:ratio=1,wire=exact", "topk:ratio=0.001"]


def optimizer_for(spec: str, route: str, model: torch.nn.Module) -> Any:
    plain = torch.optim.SGD(model.parameters(), lr=0.05)
    named = list(model.named_parameters())
    if spec == "horovod":
        return hvd.DistributedOptimizer(plain, named_parameters=named)
    if route == "stock":
        return hvd.DistributedOptimizer(plain, named, compression=gradcomp.horovod.Compression(spec, named))
    return gradcomp.horovod.DistributedOptimizer(plain, named, compression=spec)


def stepper(spec: str, route: str, device: torch.device, width: int) -> tuple[torch.nn.Module, Callable[[], None]]:
    """A model, and a step of it on made-up pictures."""
    model = digits.model(width=width).to(device)
    optimizer = optimizer_for(spec, route, model)
    generator = torch.Generator().manual_seed(hvd.rank())

    def step() -> None:
        x = torch.rand(BATCH, 64, generator=generator).to(device)
        y = torch.randint(10, (BATCH,), generator=generator).to(device)
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        with torch.profiler.record_function(trace.BACKWARD):
            loss.backward()
        optimizer.step()

    return model, step


def train(spec: str, route: str, device: torch.device, width: int) -> tuple[Tensor, float]:
    """The weights after some steps, and the median step in seconds."""
    model, step = stepper(spec, route, device, width)
    seconds = []
    for _ in range(STEPS):
        began = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    weights = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    return weights.cpu().view(torch.int32), statistics.median(seconds)


def overlap(spec: str, route: str, device: torch.device, width: int) -> dict[str, Any]:
    """Of one step, how much of gradcomp's work falls into the backward pass."""
    _, step = stepper(spec, route, device, width)
    for _ in range(3):
        step()
    with tempfile.TemporaryDirectory() as folder:
        with torch.profiler.profile() as profiler:
            step()
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return trace.overlap(json.loads(path.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--width", type=int, default=digits.WIDTH)
    options = parser.parse_args()
    hvd.init()
    device = torch.device(options.device)
    torch.use_deterministic_algorithms(True)
    checks: dict[str, bool] = {}
    milliseconds: dict[str, float] = {}

    def compare(named: str, weights: Tensor, like_stock: bool) -> None:
        first = hvd.broadcast(weights, root_rank=0, name=f"first.{named}")
        same = hvd.allreduce(torch.tensor([float(torch.equal(weights, first))]), name=f"same.{named}", op=hvd.Sum)
        checks[f"{named}: the ranks' weights are equal"] = bool(same == hvd.size())
        if like_stock:
            checks[f"{named}: weights equal stock Horovod's"] = torch.equal(weights, stock)

    stock, _ = train("horovod", "stock", device, options.width)
    for spec in SPECS:
        for route in ("stock",) if spec == "horovod" else ("stock", "direct"):
            weights, median = train(spec, route, device, options.width)
            named = spec if spec == "horovod" else f"{spec}, {route} route"
            milliseconds[named] = 1000 * median
            compare(named, weights, spec != SPECS[-1])
    if device.type == "cuda":
        for route in ("stock", "direct"):
            with torch.cuda.stream(torch.cuda.Stream()):
                weights, _ = train(SPECS[2], route, device, options.width)
            compare(f"{SPECS[2]}, {route} route, on a stream of its own", weights, True)
    result: dict[str, Any] = {"width": options.width, "steps": STEPS, "ms": milliseconds, "checks": checks}
    result["overlap"] = {route: overlap(SPECS[-1], route, device, options.width) for route in ("stock", "direct")}
    if hvd.rank() == 0:
        print("@result " + json.dumps(result), flush=True)
    hvd.barrier()
    hvd.shutdown()


if __name__ == "__main__":
    main()
