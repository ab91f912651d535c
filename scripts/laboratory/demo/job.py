"""A rank of the demo: trains on the digits, dense or compressed.

The two trainings differ in one argument: both use Horovod's own optimizer, and the compressed one gets a compression=.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import horovod.torch as hvd
import torch
from torch.nn.functional import cross_entropy

import gradcomp.horovod
from laboratory import ranks
from laboratory.demo.run import AVERAGED
from laboratory.tasks import digits

# Pictures of a rank in a step.
BATCH = 64

# Seconds between two lines of progress.
PROGRESS_SECONDS = 0.2


def optimizer_for(model: torch.nn.Module, spec: str, lr: float) -> Any:
    """Make the stock optimizer, with the one argument that differs."""
    plain = torch.optim.SGD(model.parameters(), lr=lr)
    if spec == "dense":
        return hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
    compression = gradcomp.horovod.Compression(spec, model.named_parameters())
    return hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters(), compression=compression)


def bytes_per_step(model: torch.nn.Module, spec: str, optimizer: Any) -> int:
    """Return the bytes that a rank hands to the network in a step."""
    if spec == "dense":
        return 4 * sum(parameter.numel() for parameter in model.parameters())
    return int(optimizer._compression.stats()["bytes_sent"])


def train() -> dict[str, Any]:
    """Train with the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spec", required=True, help='"dense" (stock Horovod), or a spec of gradcomp')
    parser.add_argument("--lr", type=float, required=True)
    for name in ("steps", "seed", "width"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    data, model = digits.load(), digits.model(seed=options.seed, width=options.width)
    optimizer = optimizer_for(model, options.spec, options.lr)
    batches = digits.batches(data, hvd.rank(), hvd.size(), BATCH, options.seed)
    losses, seconds = [], []
    told = 0.0
    for step in range(1, options.steps + 1):
        x, y = next(batches)
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
        losses.append(loss.item())
        if hvd.rank() == 0 and (began - told > PROGRESS_SECONDS or step == options.steps):
            told = began
            recent = statistics.mean(losses[-AVERAGED:])
            ranks.tell(f"step {step}/{options.steps}  training loss of rank 0 {recent:.4f}", step / options.steps)
    return {
        "spec": options.spec,
        "ranks": hvd.size(),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": seconds,
        "losses": hvd.allreduce(torch.tensor(losses), name="losses", op=hvd.Average).tolist(),
        "bytes_per_step": bytes_per_step(model, options.spec, optimizer),
        "accuracy": digits.accuracy(model, data),
        "ranks_equal": ranks_equal(model),
    }


def ranks_equal(model: torch.nn.Module) -> bool:
    """Check whether all ranks hold the same weights, to the last bit."""
    own = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).view(torch.int32)
    first = hvd.broadcast(own, root_rank=0, name="weights")
    return bool(hvd.allreduce(torch.tensor([float(torch.equal(own, first))]), name="equal", op=hvd.Sum) == hvd.size())


if __name__ == "__main__":
    ranks.horovod_job(train)
