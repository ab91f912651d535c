"""What each rank of the demo runs: trains on the digits, dense or compressed, and has rank 0 report.

The two differ in one argument: the optimizer is Horovod's own both times, and compressed it gets a compression=.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import digits
import horovod.torch as hvd
import torch
from torch.nn.functional import cross_entropy

import gradcomp.horovod

MARK = "@demo "
"""How a line of rank 0 begins that is meant for the progress bar."""


def optimizer_for(model: torch.nn.Module, spec: str, lr: float) -> Any:
    """The stock optimizer, and the one argument that makes the difference."""
    plain = torch.optim.SGD(model.parameters(), lr=lr)
    if spec == "dense":
        return hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
    compression = gradcomp.horovod.Compression(spec, model.named_parameters())
    return hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters(), compression=compression)


def bytes_per_step(model: torch.nn.Module, spec: str, optimizer: Any) -> int:
    """What a rank hands to the network in a step."""
    if spec == "dense":
        return 4 * sum(parameter.numel() for parameter in model.parameters())
    return int(optimizer._compression.stats()["bytes_sent"])


def train(options: argparse.Namespace) -> dict[str, Any]:
    data = digits.load()
    model = digits.model(seed=options.seed, width=options.width)
    optimizer = optimizer_for(model, options.spec, options.lr)
    batches = digits.batches(data, hvd.rank(), hvd.size(), options.batch, options.seed)
    losses, seconds = [], []
    said = 0.0
    for step in range(1, options.steps + 1):
        x, y = next(batches)
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
        losses.append(loss.item())
        if hvd.rank() == 0 and (began - said > 0.2 or step == options.steps):
            said = began
            print(f"{MARK}{step} {options.steps} {losses[-1]:.4f}", flush=True)
    everybody = hvd.allreduce(torch.tensor(losses), name="losses", op=hvd.Average).tolist()
    return {
        "spec": options.spec,
        "ranks": hvd.size(),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": seconds,
        "losses": everybody,
        "bytes_per_step": bytes_per_step(model, options.spec, optimizer),
        "accuracy": digits.accuracy(model, data),
        "ranks_equal": ranks_equal(model),
    }


def ranks_equal(model: torch.nn.Module) -> bool:
    """Whether all ranks hold the same weights, to the last bit."""
    own = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).view(torch.int32)
    first = hvd.broadcast(own, root_rank=0, name="weights")
    return bool(hvd.allreduce(torch.tensor([float(torch.equal(own, first))]), name="equal", op=hvd.Sum) == hvd.size())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spec", default="dense", help='"dense" (Horovod as it is), or a spec of gradcomp')
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch", type=int, default=64, help="pictures a rank and step")
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=digits.WIDTH, help="of the hidden layers")
    parser.add_argument("--result", type=Path, required=True, help="where rank 0 writes what came out")
    return parser.parse_args()


if __name__ == "__main__":
    options = arguments()
    hvd.init()
    result = train(options)
    if hvd.rank() == 0:
        options.result.write_text(json.dumps(result))
    hvd.barrier()  # a rank that is done would end Horovod for those that are not
    hvd.shutdown()
