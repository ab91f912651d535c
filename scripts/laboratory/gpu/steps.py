"""The training of gpu_check's ranks on random pictures, and the measurements of its steps."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from laboratory.gpu import trace
from laboratory.tasks import digits

# The steps of a training, and the pictures of a step.
STEPS, BATCH = 20, 64
EXACT, SPARSE = "topk:ratio=1,wire=exact", "topk:ratio=0.001"


class Run(NamedTuple):
    """A model in training. A call of step() is one step."""

    model: torch.nn.Module
    step: Callable[[], None]


class OnTwoStreams(torch.nn.Sequential):
    """Layers of which every other one runs on a second stream. Autograd then calls hooks on both."""

    def forward(self, x: Tensor) -> Tensor:
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        for i, layer in enumerate(self):
            before, own = (main, side) if i % 2 == 0 else (side, main)
            own.wait_stream(before)
            with torch.cuda.stream(own):
                x = layer(x)
        main.wait_stream(side)
        return x


def model(width: int, device: torch.device, streams: int = 1) -> torch.nn.Module:
    """Make the model on a device. It always has the same weights."""
    made = digits.model(width=width).to(device)
    return made if streams == 1 else OnTwoStreams(*made)


def run(model: torch.nn.Module, optimizer: Any, rank: int, device: torch.device) -> Run:
    """Make a run. Every rank draws its own pictures."""
    generator = torch.Generator().manual_seed(rank)

    def step() -> None:
        x = torch.rand(BATCH, 64, generator=generator).to(device)
        y = torch.randint(10, (BATCH,), generator=generator).to(device)
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        with torch.profiler.record_function(trace.BACKWARD):
            loss.backward()
        optimizer.step()

    return Run(model, step)


def train(run: Run, device: torch.device) -> tuple[Tensor, float]:
    """Train. Return the bits of the weights, and the median step in seconds."""
    seconds = []
    for _ in range(STEPS):
        began = time.perf_counter()
        run.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    weights = torch.cat([parameter.detach().reshape(-1) for parameter in run.model.parameters()])
    return weights.cpu().view(torch.int32), statistics.median(seconds)


def overlap(run: Run) -> dict[str, Any]:
    """Measure the share of gradcomp's work that falls into one step's backward pass."""
    for _ in range(3):
        run.step()
    with tempfile.TemporaryDirectory() as folder:
        with torch.profiler.profile() as profiler:
            run.step()
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return trace.overlap(json.loads(path.read_text()))
