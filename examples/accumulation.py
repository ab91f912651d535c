"""Gradients of several batches in one step, clipped, under DDP: torchrun --nproc-per-node 2 examples/accumulation.py.

Under Horovod, backward_passes_per_step=4 of the optimizer takes the place of no_sync().
"""

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import gradcomp

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--accumulate", type=int, default=4, metavar="N", help="batches in a step (default 4)")
parser.add_argument("--batch", type=int, default=8, metavar="N", help="examples in a batch (default 8)")
parser.add_argument("--clip", type=float, default=1.0, metavar="NORM", help="largest norm of a step's gradient (default 1.0)")
parser.add_argument("--steps", type=int, default=100)
options = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
draw = torch.Generator().manual_seed(1 + rank)
truth = torch.randn(20, 5, generator=torch.Generator().manual_seed(0))

torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
handle = gradcomp.ddp.attach(model, "topk:ratio=0.1")

losses = []
for step in range(1, options.steps + 1):
    optimizer.zero_grad()
    losses.append(0.0)
    for i in range(options.accumulate):
        x = torch.randn(options.batch, 20, generator=draw)
        last = i == options.accumulate - 1
        with nullcontext() if last else model.no_sync():  # as with DDP alone
            loss = cross_entropy(model(x), (x @ truth).argmax(1)) / options.accumulate
            loss.backward()
        losses[-1] += loss.item()
    nn.utils.clip_grad_norm_(model.parameters(), options.clip)  # with topk, this rank's own gradient
    optimizer.step()
    if step % 20 == 0 and rank == 0:
        print(f"step {step}: loss {sum(losses[-20:]) / 20:.3f} on rank 0", flush=True)
dist.barrier()  # with gloo, torch 2.13 may abort a rank that ends while its last operation is let go
dist.destroy_process_group()
