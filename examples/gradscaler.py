"""fp16 with loss scaling: torchrun --nproc-per-node 2 examples/gradscaler.py. It needs scikit-learn.

Under Horovod: horovodrun -np 2 python examples/gradscaler.py.
"""

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import gradcomp

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--scale", type=float, default=2.0**20, help="the first loss scale (default 2^20: too large)")
parser.add_argument("--steps", type=int, default=200)
options = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=options.scale)
if ddp := dist.is_torchelastic_launched():  # by torchrun
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(model)
    gradcomp.ddp.attach(model, "topk")
else:
    import horovod.torch as hvd

    hvd.init()
    rank, ranks = hvd.rank(), hvd.size()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = gradcomp.horovod.DistributedOptimizer(optimizer, model.named_parameters(), "topk")

pictures, digits = load_digits(return_X_y=True)
x, y = torch.tensor(pictures, dtype=torch.float32) / 16, torch.tensor(digits)
x, y = x[rank::ranks], y[rank::ranks]  # every rank has pictures of its own
draw = torch.Generator().manual_seed(rank)

losses, skipped = [], 0
for step in range(1, options.steps + 1):
    batch = torch.randint(len(x), (32,), generator=draw)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = cross_entropy(model(x[batch]), y[batch])
    scaler.scale(loss).backward()
    if not ddp:
        optimizer.synchronize()  # exchange, then unscale
        scaler.unscale_(optimizer)
    with nullcontext() if ddp else optimizer.skip_synchronize():
        scaler.step(optimizer)
    before = scaler.get_scale()
    scaler.update()
    skipped += scaler.get_scale() < before  # all ranks skip the same steps
    losses.append(loss.item())
    if step % 50 == 0 and rank == 0:
        print(f"step {step}: loss {sum(losses[-50:]) / 50:.3f} on rank 0, {skipped} skipped so far", flush=True)
if ddp:
    dist.barrier()  # with gloo, torch 2.13 may abort a rank that ends while its last operation is let go
    dist.destroy_process_group()
