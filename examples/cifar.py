"""A small residual net on CIFAR-10 under DDP: torchrun --nproc-per-node 2 examples/cifar.py --data cifar-10-batches-bin.

Without --data it trains on scikit-learn's handwritten digits, and says so.
"""

import argparse
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu
from torch.nn.parallel import DistributedDataParallel

import gradcomp


def load(folder: str | None) -> tuple[Tensor, Tensor]:
    """Read CIFAR-10's binary version, or the digits: pictures in [-1, 1] and classes."""
    if folder is None:
        from sklearn.datasets import load_digits

        found = load_digits()
        return torch.tensor(found.images, dtype=torch.float32)[:, None].expand(-1, 3, -1, -1) / 8 - 1, torch.tensor(
            found.target
        )
    files = sorted(Path(folder).glob("data_batch_*.bin"))
    if not files:
        raise SystemExit(f"--data {folder} has no data_batch_*.bin; name the folder of CIFAR-10's binary version")
    rows = numpy.concatenate([numpy.fromfile(file, numpy.uint8) for file in files]).reshape(-1, 3073)  # a class, 3 * 32 * 32
    return torch.tensor(rows[:, 1:]).view(-1, 3, 32, 32) / 127.5 - 1, torch.tensor(rows[:, 0]).long()


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(before, after, 3, stride, 1), nn.BatchNorm2d(after), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(after, after, 3, 1, 1), nn.BatchNorm2d(after))
        self.shortcut = nn.Conv2d(before, after, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return relu(self.second(self.first(x)) + self.shortcut(x))


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--data", help="the folder of CIFAR-10's binary version")
parser.add_argument("--steps", type=int, default=200)
options = parser.parse_args()
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
x, y = load(options.data)
if rank == 0:
    print(f"training on {len(x)} pictures of {'CIFAR-10' if options.data else 'digits: no --data was given'}", flush=True)
x, y = x[rank::ranks], y[rank::ranks]  # every rank has pictures of its own
draw = torch.Generator().manual_seed(rank)

torch.manual_seed(0)
blocks = [Block(3, 16, 1), Block(16, 32, 2), Block(32, 64, 2)]
model = DistributedDataParallel(nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
gradcomp.ddp.attach(model, "topk; *.bias=dense")  # layers by name: biases are sent whole

losses = []
for step in range(1, options.steps + 1):
    batch = torch.randint(len(x), (32,), generator=draw)
    optimizer.zero_grad()
    loss = cross_entropy(model(x[batch]), y[batch])
    loss.backward()
    optimizer.step()
    schedule.step()
    losses.append(loss.item())
    if step % 20 == 0 and rank == 0:
        print(f"step {step}: loss {sum(losses[-20:]) / 20:.3f} on rank 0", flush=True)
dist.barrier()  # with gloo, torch 2.13 may abort a rank that ends while its last operation is let go
dist.destroy_process_group()
