"""A training that is killed and goes on: torchrun --nproc-per-node 2 examples/resume.py FOLDER, then the same command again.

It has AdamW, accumulation, a clip and a schedule. All ranks save: each has a residual and moments of its own.
"""

import argparse
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import gradcomp

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("folder", type=Path, help="the folder of checkpoints, one that all hosts see")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--every", type=int, default=10, help="steps between checkpoints (default 10)")
options = parser.parse_args()

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
truth = torch.randn(20, 5, generator=torch.Generator().manual_seed(0))
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
handle = gradcomp.ddp.attach(model, "topk:ratio=0.05")


def load() -> int:
    """Load the newest checkpoint that all ranks finished. Return its step, or 0."""
    for folder in sorted(options.folder.glob("step-*"), reverse=True):
        states = {int(file.stem): torch.load(file, weights_only=True, map_location="cpu") for file in folder.glob("*.pt")}
        if {state["gradcomp"]["ranks"] for state in states.values()} == {len(states)}:
            for name, part in (("model", model), ("optimizer", optimizer), ("schedule", schedule)):
                part.load_state_dict(states.get(rank, states[0])[name])  # each rank's optimizer has moments of its own
            handle.load_state_dict([state["gradcomp"] for state in states.values()])
            return int(states[0]["step"])
    return 0


def save(step: int) -> None:
    """Save this rank's state. A rank that ends in mid-save leaves no broken file. Files of more ranks than there are go."""
    folder = options.folder / f"step-{step:08}"
    folder.mkdir(parents=True, exist_ok=True)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict(), "step": step}
    torch.save({**state, "gradcomp": handle.state_dict()}, folder / f"{rank}.new")
    (folder / f"{rank}.new").rename(folder / f"{rank}.pt")
    for file in folder.glob("*.pt"):
        if int(file.stem) >= ranks:
            file.unlink(missing_ok=True)


began = load()
if rank == 0:
    print(f"goes on after step {began}" if began else "begins", flush=True)
losses = []
for step in range(began + 1, options.steps + 1):
    draw = torch.Generator().manual_seed(ranks * step + rank)  # a resumed training draws the same batches
    optimizer.zero_grad()
    losses.append(0.0)
    for i, x in enumerate(torch.randn(2, 8, 20, generator=draw)):  # two batches a step
        with model.no_sync() if i == 0 else nullcontext():
            loss = cross_entropy(model(x), (x @ truth).argmax(1)) / 2
            loss.backward()
        losses[-1] += loss.item()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    if step % options.every == 0:
        save(step)
if rank == 0:
    print(f"ends after step {options.steps}; the sum of all weights is {sum(p.sum().item() for p in model.parameters())!r}")
dist.barrier()  # with gloo, torch 2.13 may abort a rank that ends while its last operation is let go
dist.destroy_process_group()
