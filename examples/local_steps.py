"""Two machines at home: torchrun --nproc-per-node 2 examples/local_steps.py states tries it on one. It needs scikit-learn.

On two, whose link carries a few Mbit/s, each runs this with its own number, and its own folder of states:

torchrun --nnodes 2 --nproc-per-node 1 --node-rank 0 --master-addr FIRST --master-port 29500 examples/local_steps.py states

Started again it goes on, also without a machine that is gone, or with one more (--nnodes 3).
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import gradcomp

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("folder", type=Path, help="of the states of this machine's ranks")
parser.add_argument("--spec", default="sign", help="the compressor and its knobs (default sign)")
parser.add_argument("--every", type=int, default=20, help="steps from one synchronization to the next (default 20)")
parser.add_argument("--steps", type=int, default=200)
options = parser.parse_args()

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
pictures, digits = load_digits(return_X_y=True)
x, y = torch.tensor(pictures, dtype=torch.float32) / 16, torch.tensor(digits)
x, y = x[rank::ranks], y[rank::ranks]  # every rank has pictures of its own

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))  # no DistributedDataParallel around it
optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
local = gradcomp.local.LocalSteps(model, optimizer, options.spec, sync_every=options.every)


def gathered(own: Any) -> list[Any]:
    """Return what all ranks have."""
    of_ranks: list[Any] = [None] * ranks
    dist.all_gather_object(of_ranks, own)
    return of_ranks


saved = {int(file.stem): file for file in (options.folder / f"rank-{rank}").glob("*.pt")}
if common := set.intersection(*([{*steps} for steps in gathered([*saved]) if steps] or [set()])):
    states = gathered(torch.load(saved[max(common)], weights_only=True) if saved else None)
    local.load_state_dict([state for state in states if state is not None])

losses = []
for step in range(local.stats()["steps"], options.steps):
    batch = torch.randint(len(x), (32,), generator=torch.Generator().manual_seed(1000 * step + rank))
    local.zero_grad()
    loss = cross_entropy(model(x[batch]), y[batch])
    loss.backward()
    local.step()  # every 20th also exchanges
    losses.append(loss.item())
    if (step + 1) % options.every == 0:
        file = options.folder / f"rank-{rank}" / f"{step + 1}.pt"
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(local.state_dict(), file)
        if rank == 0:
            print(f"step {step + 1}: loss {sum(losses[-20:]) / len(losses[-20:]):.3f} on rank 0", flush=True)
local.flush()  # all ranks have the same weights now

if rank == 0 and (fewer := local.stats()["payload_ratio"]):
    print(f"each of {ranks} ranks sends {fewer:.0f} times fewer bytes than the gradients of all steps have")
dist.barrier()  # with gloo, torch 2.13 may abort a rank that ends while its last operation is let go
dist.destroy_process_group()
