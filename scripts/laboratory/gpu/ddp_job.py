"""A rank of gpu_check under torchrun: DDP on one device, without and with gradcomp, and the comparison of weights."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

import gradcomp.ddp
from laboratory import ranks
from laboratory.gpu import steps

LIKE_DDP, NEAR_DDP = ["ddp", "dense"], [steps.EXACT]
OTHERS = [steps.SPARSE, "sdagc", "orq:route=alltoall", "gtopk", "gs_sgd"]


def make(spec: str, model: torch.nn.Module) -> tuple[torch.nn.Module, Any]:
    """Wrap a model, and attach gradcomp unless DDP is to run by itself."""
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
    if spec != "ddp":
        gradcomp.ddp.attach(wrapped, spec)
    return wrapped, optimizer


def agree(named: str, weights: Tensor) -> bool:
    """Tell whether all ranks have these weights."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, weights)
    return all(torch.equal(weights, other) for other in gathered)


@record  # torchrun shows the exception
def run(description: str | None, compared: Callable[[argparse.Namespace], dict[str, Any]]) -> None:
    """Join the ranks, compare, and let rank 0 report. description: of the job, for --help."""
    parser = steps.parser(description)
    parser.add_argument("--backend", choices=("gloo", "nccl"), required=True)
    options = parser.parse_args()
    os.environ.update(steps.NCCL)
    dist.init_process_group(options.backend)
    result = compared(options)
    if dist.get_rank() == 0:
        ranks.report({"backend": options.backend, **result})
    dist.destroy_process_group()
    os._exit(0)  # torch's threads and this process end in no fixed order, and now and then abort it after all is done


def compared(options: argparse.Namespace) -> dict[str, Any]:
    """Train under every spec."""
    return steps.compare([*LIKE_DDP, *NEAR_DDP, *OTHERS], LIKE_DDP, make, agree, options, dist.get_rank(), NEAR_DDP)


if __name__ == "__main__":
    run(__doc__, compared)
