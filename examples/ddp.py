"""Handwritten digits under DDP: torchrun --nproc-per-node 2 examples/ddp.py. It needs scikit-learn."""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import gradcomp

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--spec", default="topk", help="the compressor and its knobs (default topk)")
parser.add_argument("--steps", type=int, default=200)
options = parser.parse_args()

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
pictures, digits = load_digits(return_X_y=True)
x, y = torch.tensor(pictures, dtype=torch.float32) / 16, torch.tensor(digits)
x, y = x[rank::ranks], y[rank::ranks]  # every rank has pictures of its own
draw = torch.Generator().manual_seed(rank)

torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
handle = gradcomp.ddp.attach(model, options.spec)  # the one new line, on all ranks

losses = []
for step in range(1, options.steps + 1):
    batch = torch.randint(len(x), (32,), generator=draw)
    optimizer.zero_grad()
    loss = cross_entropy(model(x[batch]), y[batch])
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 50 == 0 and rank == 0:
        print(f"step {step}: loss {sum(losses[-50:]) / 50:.3f} on rank 0", flush=True)

if rank == 0:
    sent = handle.stats()["payload_ratio"]
    print(f"{options.spec}: each of {ranks} ranks sends {sent:.0f} times fewer bytes than dense gradients have")
dist.barrier()  # with gloo, torch 2.13 may abort a rank that ends while its last operation is let go
dist.destroy_process_group()
