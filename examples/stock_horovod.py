"""Handwritten digits under an unmodified Horovod: horovodrun -np 2 python examples/stock_horovod.py. It needs scikit-learn.

The file is not named horovod.py: Python would import it in place of Horovod.
"""

import argparse

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import gradcomp

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--spec", default="topk", help="the compressor and its knobs (default topk)")
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
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
compression = gradcomp.horovod.Compression(options.spec, model.named_parameters())
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=compression,  # the one new argument
)

losses = []
for step in range(1, options.steps + 1):
    batch = torch.randint(len(x), (32,), generator=draw)
    optimizer.zero_grad()
    loss = cross_entropy(model(x[batch]), y[batch])
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 50 == 0 and hvd.rank() == 0:
        print(f"step {step}: loss {sum(losses[-50:]) / 50:.3f} on rank 0", flush=True)

if hvd.rank() == 0:
    sent = compression.stats()["payload_ratio"]
    print(f"{options.spec}: each of {hvd.size()} ranks sends {sent:.0f} times fewer bytes than dense gradients have")
