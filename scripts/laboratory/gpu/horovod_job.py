"""A rank of gpu_check under horovodrun: stock Horovod on one device, and the comparison of weights."""

from __future__ import annotations

import os
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor

import gradcomp.horovod
from laboratory import ranks
from laboratory.gpu import steps

SPECS = ["dense", steps.EXACT, steps.SPARSE]
WAYS = ["horovod", *(f"{spec}, {route} route" for spec in SPECS for route in ("stock", "direct"))]


def make(way: str, model: torch.nn.Module) -> tuple[torch.nn.Module, Any]:
    """Make an optimizer on one of gradcomp's two routes, or Horovod's own."""
    plain, named = torch.optim.SGD(model.parameters(), lr=0.05), list(model.named_parameters())
    spec, _, route = way.partition(", ")
    if way == "horovod":
        return model, hvd.DistributedOptimizer(plain, named_parameters=named)
    if route == "stock route":
        return model, hvd.DistributedOptimizer(plain, named, compression=gradcomp.horovod.Compression(spec, named))
    return model, gradcomp.horovod.DistributedOptimizer(plain, named, compression=spec)


def agree(named: str, weights: Tensor) -> bool:
    """Tell whether all ranks have these weights."""
    first = hvd.broadcast(weights, root_rank=0, name=f"first.{named}")
    same = hvd.allreduce(torch.tensor([float(torch.equal(weights, first))]), name=f"same.{named}", op=hvd.Sum)
    return bool(same == hvd.size())


def main() -> None:
    """Train under every spec and route, and report."""
    options = steps.parser(__doc__).parse_args()
    os.environ.update(steps.NCCL)
    hvd.init()
    like_stock, near_stock = (
        [way for way in WAYS if way.startswith(beginnings)] for beginnings in (("horovod", "dense"), steps.EXACT)
    )
    result = steps.compare(WAYS, like_stock, make, agree, options, hvd.rank(), near_stock)
    if hvd.rank() == 0:
        ranks.report(result)
    hvd.barrier()  # a rank that shuts down ends Horovod for the others
    hvd.shutdown()


if __name__ == "__main__":
    main()
