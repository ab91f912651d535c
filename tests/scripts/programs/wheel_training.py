"""Trains on ranks of torchrun, as the README shows it, and holds that the loss falls, ranks agree and little is sent."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradcomp

dist.init_process_group("gloo")
torch.manual_seed(0)
target = nn.Linear(64, 10)
net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
handle = gradcomp.ddp.attach(model, "topk:ratio=0.01", optimizer=optimizer)

torch.manual_seed(1 + dist.get_rank())
losses = []
for _ in range(300):
    x = torch.randn(64, 64)
    loss = nn.functional.cross_entropy(model(x), target(x).argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

weights = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
others = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
dist.all_gather(others, weights)
assert all(torch.equal(weights, other) for other in others), "the ranks' weights differ"
first, last = sum(losses[:10]) / 10, sum(losses[-10:]) / 10
assert last < first / 2, f"the loss went from {first:.2f} to {last:.2f}"
compression = handle.stats()["compression"]
assert compression > 50, compression
assert gradcomp.__file__.startswith(sys.prefix), f"{gradcomp.__file__} is not the installed one"
if dist.get_rank() == 0:
    print(f"{len(losses)} steps of two ranks: loss {first:.2f} to {last:.2f}, {compression:.0f} times fewer bytes than dense")
dist.destroy_process_group()
