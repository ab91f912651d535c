"""Two sites of two ranks: torchrun --nproc-per-node 4 examples/two_sites.py. It needs scikit-learn.

The ranks of a site exchange compressed gradients in every step. The sites, whose link carries a few Mbit/s, exchange their
progress after every twentieth.
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import gradcomp

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--ranks-per-site", type=int, default=2, help="its ranks follow one another (default 2)")
parser.add_argument("--spec", default="blocks", help="the compressor within a site (default blocks)")
parser.add_argument("--between", default="sign", help="the compressor between the sites (default sign)")
parser.add_argument("--every", type=int, default=20, help="steps from one synchronization to the next (default 20)")
parser.add_argument("--steps", type=int, default=200)
options = parser.parse_args()

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
pictures, digits = load_digits(return_X_y=True)
x, y = torch.tensor(pictures, dtype=torch.float32) / 16, torch.tensor(digits)
x, y = x[rank::ranks], y[rank::ranks]  # every rank has pictures of its own
draw = torch.Generator().manual_seed(rank)

torch.manual_seed(0)
site, _ = dist.new_subgroups(options.ranks_per_site)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)), process_group=site)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
handle = gradcomp.ddp.attach(model, options.spec)  # within the site
local = gradcomp.local.LocalSteps(model, optimizer, options.between, sync_every=options.every)  # between sites

losses = []
for step in range(1, options.steps + 1):
    batch = torch.randint(len(x), (32,), generator=draw)
    local.zero_grad()
    loss = cross_entropy(model(x[batch]), y[batch])
    loss.backward()
    local.step()  # every 20th also exchanges between the sites
    losses.append(loss.item())
    if step % 50 == 0 and rank == 0:
        print(f"step {step}: loss {sum(losses[-50:]) / 50:.3f} on rank 0", flush=True)
local.flush()  # all sites have the same weights now

if rank == 0 and (fewer := local.stats()["payload_ratio"]):
    print(f"between the sites, each rank sends {fewer:.0f} times fewer bytes than the gradients of all steps have")
dist.barrier()  # with gloo, torch 2.13 may abort a rank that ends while its last operation is let go
dist.destroy_process_group()
