"""A rank of gpu_check under torchrun: DDP on one device, without and with gradcomp, compared bit for bit, or timed alone."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

import gradcomp.ddp
from laboratory import ranks
from laboratory.gpu import steps
from laboratory.tasks import digits

ALONE = "ddp"
LIKE_ALONE = [ALONE, "dense", steps.EXACT]
OTHERS = [steps.SPARSE, "sdagc", "orq:route=alltoall", "gtopk", "gs_sgd"]


@record  # torchrun shows the exception
def main() -> None:
    """Train under every spec, and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--backend", choices=("gloo", "nccl"), required=True)
    parser.add_argument("--width", type=int, default=digits.WIDTH)
    options = parser.parse_args()
    dist.init_process_group(options.backend)
    rank, device = dist.get_rank(), torch.device(options.device)
    torch.use_deterministic_algorithms(True)
    checks: dict[str, bool] = {}
    milliseconds: dict[str, float] = {}

    def run(spec: str, streams: int = 1) -> steps.Run:
        whole = DistributedDataParallel(steps.model(options.width, device, streams))
        optimizer = torch.optim.SGD(whole.parameters(), lr=0.05)
        if spec != ALONE:
            gradcomp.ddp.attach(whole, spec, optimizer=optimizer)
        return steps.run(whole, optimizer, rank, device)

    def compare(named: str, weights: Tensor, like_alone: bool) -> None:
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, weights)
        checks[f"{named}: the ranks' weights are equal"] = all(torch.equal(weights, other) for other in of_ranks)
        if like_alone:
            checks[f"{named}: weights equal those of DDP by itself"] = torch.equal(weights, alone)

    alone, _ = steps.train(run(ALONE), device)
    for spec in (*LIKE_ALONE, *OTHERS):
        weights, median = steps.train(run(spec), device)
        milliseconds[spec] = 1000 * median
        compare(spec, weights, spec in LIKE_ALONE)
    if device.type == "cuda":
        with torch.cuda.stream(torch.cuda.Stream()):
            weights, _ = steps.train(run(steps.EXACT), device)
        compare(f"{steps.EXACT}, on a stream of its own", weights, True)
        weights, _ = steps.train(run(steps.EXACT, streams=2), device)
        compare(f"{steps.EXACT}, layers on two streams", weights, True)
    result: dict[str, Any] = {"backend": options.backend, "width": options.width, "steps": steps.STEPS, "checks": checks}
    if dist.get_world_size() == 1:  # ranks that share a device take turns, and their times mean nothing
        result |= {"ms": milliseconds, "overlap": steps.overlap(run(steps.SPARSE))}
    if rank == 0:
        ranks.report(result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
