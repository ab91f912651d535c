"""Two models against each other, both losses through DDP, with AdamW: torchrun --nproc-per-node 2 examples/gan.py.

The generator's loss goes through the discriminator, whose gradients from it are dropped by zero_grad().
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy
from torch.nn.parallel import DistributedDataParallel

import gradcomp

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--spec", default="blocks", help="the compression of both models, or none (default blocks)")
options = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
draw = torch.Generator().manual_seed(1 + rank)
pictures = torch.tensor(load_digits().data, dtype=torch.float32) / 16

torch.manual_seed(0)
model = nn.ModuleDict(
    {
        "generator": nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 64), nn.Sigmoid()),
        "discriminator": nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1)),
    }
)
generator, discriminator = (DistributedDataParallel(part) for part in model.values())
of_generator, of_discriminator = (
    torch.optim.AdamW(part.parameters(), 1e-3, betas=(0.5, 0.999)) for part in (generator, discriminator)
)
if options.spec != "none":
    gradcomp.ddp.attach(generator, options.spec)
    gradcomp.ddp.attach(discriminator, options.spec)

yes, no = torch.ones(32, 1), torch.zeros(32, 1)
losses = []
for _ in range(options.steps):
    real = pictures[torch.randint(len(pictures), (32,), generator=draw)]
    fake = generator(torch.randn(32, 16, generator=draw))
    of_discriminator.zero_grad()
    loss = cross_entropy(discriminator(torch.cat([real, fake.detach()])), torch.cat([yes, no]))
    loss.backward()
    of_discriminator.step()
    of_generator.zero_grad()
    cross_entropy(discriminator(fake), yes).backward()
    of_generator.step()
    losses.append(loss.item())

with torch.no_grad():
    made = generator.module(torch.randn(2000, 16, generator=torch.Generator().manual_seed(5)))
gap = (made.mean(0) - pictures.mean(0)).norm().item()
if rank == 0:
    print(f"{options.spec}: the mean of made pictures is {gap:.2f} from that of real ones, after {options.steps} steps")
dist.barrier()  # with gloo, torch 2.13 may abort a rank that ends while its last operation is let go
dist.destroy_process_group()
