"""What the host pays: python -m laboratory.gpu.prices --help. Single calls, and a GPT's step with torch's hooks and gradcomp's.

One rank: nothing travels. A hook in C++ beside the same one in Python, and gradients set to None and to zero, tell where the
time of a step goes; a larger batch, whether a GPU hides it. The record is written anew after each way.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laboratory.gpu.gpt_steps import SHAPES, Shape, alone, kernels, seconds, stepping
from laboratory.gpu.stages import attempt

# `builtin` is torch's all-reduce hook in C++, `allreduce` the same in Python.
WAYS = ("ddp", "builtin", "allreduce", "bf16", "dense", "topk")
# The steps before those that count, and these.
WARM, TIMED = 3, 8
# Calls in a row, which fit into a GPU's queue, and rows.
CALLS, ROWS = 200, 10
# Calls that a CPU does not have.
OF_A_GPU = ("memset", "event", "record", "wait_event")
# The factor of the second batch: there the GPU is busy, not the host.
LARGER = 4


def single(device: torch.device) -> dict[str, float | None]:
    """Return the microseconds that the host takes for single calls; None for those that only a GPU has."""
    on_gpu = device.type == "cuda"
    small, here, there = (torch.zeros(count, device=device) for count in (1024, 750_000, 750_000))

    def resolved() -> None:
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[device] if on_gpu else None)
        future.set_result(small)

    calls: dict[str, Callable[[], object]] = {
        "launch": lambda: small.add_(1.0),
        "copy_3_mb": lambda: there.copy_(here),
        "future": resolved,
        "all_reduce": lambda: dist.all_reduce(small, async_op=True),
    }
    if on_gpu:
        stream, event = torch.cuda.current_stream(), torch.cuda.Event()
        memset = ctypes.c_void_p(small.data_ptr()), 0, ctypes.c_size_t(4096), ctypes.c_void_p(stream.cuda_stream)
        calls |= {
            "event": lambda: torch.cuda.Event().record(stream),
            "record": lambda: event.record(stream),
            "wait_event": lambda: stream.wait_event(event),
        }
        with contextlib.suppress(OSError):  # a torch that has the runtime inside
            runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")
            calls["memset"] = lambda: runtime.cudaMemsetAsync(*memset)

    def price(call: Callable[[], object]) -> float:
        rows = [seconds(call, CALLS, device) for _ in range(ROWS + 1)]
        return round(1e6 * statistics.median(rows[1:]), 2)

    return {**dict.fromkeys(OF_A_GPU), **{name: price(call) for name, call in calls.items()}}


def measure(way: str, device: torch.device, shape: Shape) -> dict[str, Any]:
    """Time a way's steps, with gradients set to None, and to zero."""
    gc.collect()  # the last way's model
    step, ms = stepping(way, "adamw", 25, device, shape), {}
    for name, to_none in (("to_none", True), ("to_zero", False)):
        seconds(lambda to_none=to_none: step(to_none), WARM, device)  # type: ignore[misc]
        each = [seconds(lambda to_none=to_none: step(to_none), 1, device) for _ in range(TIMED)]  # type: ignore[misc]
        ms[name] = [round(1000 * one, 2) for one in (statistics.median(each), min(each), max(each))]
    return {"ms": ms, **(kernels(step) if device.type == "cuda" else {"gpu_ms": None, "launches": None})}


def main() -> None:
    """Price single calls, then steps of two shapes."""
    parser = argparse.ArgumentParser(prog="python -m laboratory.gpu.prices", description=__doc__)
    parser.add_argument("--device", choices=SHAPES, required=True)
    parser.add_argument("--out", type=Path, required=True, help="the record")
    options = parser.parse_args()
    device = torch.device(options.device, 0)
    first = SHAPES[options.device]
    found: dict[str, Any] = {"settings": alone(device), "us": single(device), "ways": []}
    for shape in (first, first._replace(batch=LARGER * first.batch)):
        for way in WAYS:
            known = {"way": way, "batch": f"{shape.batch} x {shape.length:,} tokens"}
            attempt(found, "ways", known, partial(measure, way, device, shape), options.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
