"""The training of gpu_check's ranks on random pictures, under every way to exchange gradients, and their comparison."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from laboratory.tasks import digits

# The steps of a training, and the pictures of a step.
STEPS, BATCH = 20, 64
EXACT, SPARSE = "topk:ratio=1,wire=exact", "topk:ratio=0.001"
# Where updates of all entries are exchanged, weights differ from those of a mean gradient by rounding, of at most so much; and
# where models compute in half precision, in which a last bit turns the next result.
ROUNDING, ROUNDING_OF_HALVES = 1e-5, 1e-3

# NCCL takes several ranks on one GPU if each is a host of its own, joined through the loopback interface.
RANK = os.environ.get("RANK", os.environ.get("HOROVOD_RANK", "0"))
NCCL = {"NCCL_HOSTID": f"rank{RANK}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}

Make = Callable[[str, torch.nn.Module], tuple[torch.nn.Module, Any]]


class OnTwoStreams(torch.nn.Sequential):
    """Layers that run on two streams in turn. Autograd then calls hooks on both."""

    def forward(self, x: Tensor) -> Tensor:
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        for i, layer in enumerate(self):
            before, now = (main, side) if i % 2 == 0 else (side, main)
            now.wait_stream(before)
            with torch.cuda.stream(now):
                x = layer(x)
        main.wait_stream(side)
        return x


def parser(description: str | None) -> argparse.ArgumentParser:
    """Make the parser of a job's options."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--device", choices=("cpu", "cuda"), required=True)
    made.add_argument("--width", type=int, default=digits.WIDTH)
    return made


def train(model: torch.nn.Module, optimizer: Any, rank: int, device: torch.device) -> Tensor:
    """Train on pictures of this rank's own. Return the bits of the weights. An optimizer may scale the loss."""
    generator = torch.Generator().manual_seed(rank)
    scale = getattr(optimizer, "scale", lambda loss: loss)
    for _ in range(STEPS):
        x = torch.rand(BATCH, 64, generator=generator).to(device)
        y = torch.randint(10, (BATCH,), generator=generator).to(device)
        optimizer.zero_grad()
        scale(cross_entropy(model(x), y)).backward()
        optimizer.step()
    whole = (each.full_tensor() if isinstance(each, DTensor) else each for each in model.parameters())
    return torch.cat([each.detach().reshape(-1) for each in whole]).cpu().view(torch.int32)


def compare(
    ways: Sequence[str],
    like_first: Collection[str],
    make: Make,
    agree: Callable[[str, Tensor], bool],
    options: argparse.Namespace,
    rank: int,
    near_first: Collection[str] = (),
) -> dict[str, Any]:
    """Train by every way, and return the checks.

    ways: the first is the exchange without gradcomp; those in like_first must give its weights, those in near_first but for
    rounding. make: wraps a model and makes its optimizer, for a way. agree: tells whether all ranks have these weights.
    """
    torch.use_deterministic_algorithms(True)
    device = torch.device(options.device)
    checks: dict[str, bool] = {}

    def run(way: str, streams: int = 1) -> Tensor:
        model = digits.model(width=options.width).to(device)
        wrapped, optimizer = make(way, model if streams == 1 else OnTwoStreams(*model))
        return train(wrapped, optimizer, rank, device)

    first, found = run(ways[0]), {}
    for way in ways:
        found[way] = weights = run(way)
        checks[f"{way}: the ranks' weights are equal"] = agree(way, weights)
        if way in like_first:
            checks[f"{way}: weights equal those of {ways[0]} by itself"] = torch.equal(weights, first)
        elif way in near_first:
            distance = (weights.view(torch.float32) - first.view(torch.float32)).abs().max()
            most = ROUNDING_OF_HALVES if way.startswith("scaled") else ROUNDING
            checks[f"{way}: weights equal those of {ways[0]} by itself, but for rounding"] = bool(distance <= most)
    for way in ways if device.type == "cuda" else ():
        if way.startswith(EXACT):
            with torch.cuda.stream(torch.cuda.Stream()):
                weights = run(way)
            for how, each in (("on another stream", weights), ("layers on two streams", run(way, streams=2))):
                checks[f"{way}, {how}: the ranks' weights are equal"] = agree(f"{way}, {how}", each)
                checks[f"{way}, {how}: weights equal those on the main stream"] = torch.equal(each, found[way])
    return {"width": options.width, "steps": STEPS, "checks": checks}
