"""A rank that trains under auto on the cluster's link, by the door on the command line, and says what was chosen."""

import json
import statistics
import sys
import time

import torch
from torch import nn

STEPS, LAST = 70, 10


def train(door: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 128))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    if door == "ddp":
        import torch.distributed as dist

        import gradcomp

        dist.init_process_group("gloo")
        wrapped = nn.parallel.DistributedDataParallel(model)
        stats = gradcomp.ddp.attach(wrapped, "auto", optimizer=optimizer).stats
    else:
        import horovod.torch as hvd

        import gradcomp.horovod

        hvd.init()
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        wrapped = model
        optimizer = gradcomp.horovod.DistributedOptimizer(optimizer, model.named_parameters(), compression="auto")
        stats = optimizer.stats
    taken = []
    while len(taken) < STEPS:
        began = time.perf_counter()
        optimizer.zero_grad()
        wrapped(torch.randn(8, 256)).square().mean().backward()
        optimizer.step()
        taken.append(time.perf_counter() - began)
    auto = stats()["auto"]
    after = statistics.median(taken[-LAST:])
    weights = float(sum(p.detach().double().abs().sum() for p in model.parameters()))
    print(json.dumps({"way": auto["way"], "stock": auto["seconds"]["stock"], "after": after, "weights": weights}), flush=True)
    if door == "ddp":
        dist.destroy_process_group()
    else:
        hvd.barrier()  # a rank that is done would end Horovod for those that are not
        hvd.shutdown()


if __name__ == "__main__":
    train(sys.argv[1])
