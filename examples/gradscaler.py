"""fp16 with loss scaling under Horovod: horovodrun -np 2 python examples/gradscaler.py. It needs scikit-learn.

Under DDP, pass scaler= to gradcomp.ddp.attach(), and call scaler.step() and scaler.update() as usual.
"""

import argparse

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import gradcomp

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--scale", type=float, default=2.0**20, help="the first loss scale (default 2^20: too large)")
parser.add_argument("--steps", type=int, default=200)
options = parser.parse_args()

hvd.init()
pictures, digits = load_digits(return_X_y=True)
x, y = torch.tensor(pictures, dtype=torch.float32) / 16, torch.tensor(digits)
x, y = x[hvd.rank() :: hvd.size()], y[hvd.rank() :: hvd.size()]  # every rank has pictures of its own
draw = torch.Generator().manual_seed(hvd.rank())

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
scaler = torch.amp.GradScaler("cpu", init_scale=options.scale)
optimizer = gradcomp.horovod.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    model.named_parameters(),
    compression="topk",
    scaler=scaler,  # what waits is kept without the scale
)

losses, skipped = [], 0
for step in range(1, options.steps + 1):
    batch = torch.randint(len(x), (32,), generator=draw)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = cross_entropy(model(x[batch]), y[batch])
    scaler.scale(loss).backward()
    optimizer.synchronize()  # exchange, then unscale
    scaler.unscale_(optimizer)
    with optimizer.skip_synchronize():
        scaler.step(optimizer)
    before = scaler.get_scale()
    scaler.update()
    skipped += scaler.get_scale() < before  # all ranks skip the same steps
    losses.append(loss.item())
    if step % 50 == 0 and hvd.rank() == 0:
        print(f"step {step}: loss {sum(losses[-50:]) / 50:.3f} on rank 0, {skipped} skipped so far", flush=True)
