"""A rank of gpu_check under horovodrun: stock Horovod on one device, compared bit for bit. One rank alone is timed."""

from __future__ import annotations

import argparse
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor

import gradcomp.horovod
from laboratory import ranks
from laboratory.gpu import steps
from laboratory.tasks import digits

SPECS = ["horovod", "dense", steps.EXACT, steps.SPARSE]


def optimizer_for(spec: str, route: str, model: torch.nn.Module) -> Any:
    """Make an optimizer on one of gradcomp's two routes, or Horovod's own."""
    plain = torch.optim.SGD(model.parameters(), lr=0.05)
    named = list(model.named_parameters())
    if spec == "horovod":
        return hvd.DistributedOptimizer(plain, named_parameters=named)
    if route == "stock":
        return hvd.DistributedOptimizer(plain, named, compression=gradcomp.horovod.Compression(spec, named))
    return gradcomp.horovod.DistributedOptimizer(plain, named, compression=spec)


def measure() -> dict[str, Any]:
    """Train under every spec and route."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--width", type=int, default=digits.WIDTH)
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.use_deterministic_algorithms(True)
    checks: dict[str, bool] = {}
    milliseconds: dict[str, float] = {}

    def run(spec: str, route: str, streams: int = 1) -> steps.Run:
        model = steps.model(options.width, device, streams)
        return steps.run(model, optimizer_for(spec, route, model), hvd.rank(), device)

    def compare(named: str, weights: Tensor, like_stock: bool) -> None:
        first = hvd.broadcast(weights, root_rank=0, name=f"first.{named}")
        same = hvd.allreduce(torch.tensor([float(torch.equal(weights, first))]), name=f"same.{named}", op=hvd.Sum)
        checks[f"{named}: the ranks' weights are equal"] = bool(same == hvd.size())
        if like_stock:
            checks[f"{named}: weights equal stock Horovod's"] = torch.equal(weights, stock)

    stock, _ = steps.train(run("horovod", "stock"), device)
    for spec in SPECS:
        for route in ("stock",) if spec == "horovod" else ("stock", "direct"):
            weights, median = steps.train(run(spec, route), device)
            named = spec if spec == "horovod" else f"{spec}, {route} route"
            milliseconds[named] = 1000 * median
            compare(named, weights, spec != steps.SPARSE)
    if device.type == "cuda":
        for route in ("stock", "direct"):
            with torch.cuda.stream(torch.cuda.Stream()):
                weights, _ = steps.train(run(steps.EXACT, route), device)
            compare(f"{steps.EXACT}, {route} route, on a stream of its own", weights, True)
            weights, _ = steps.train(run(steps.EXACT, route, streams=2), device)
            compare(f"{steps.EXACT}, {route} route, layers on two streams", weights, True)
    result: dict[str, Any] = {"width": options.width, "steps": steps.STEPS, "checks": checks}
    if hvd.size() == 1:  # ranks that share a device take turns, and their times mean nothing
        overlap = {route: steps.overlap(run(steps.SPARSE, route)) for route in ("stock", "direct")}
        result |= {"ms": milliseconds, "overlap": overlap}
    return result


if __name__ == "__main__":
    ranks.horovod_job(measure)
