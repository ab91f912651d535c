"""A loop with Lightning's Fabric: torchrun --nproc-per-node 2 examples/fabric_loop.py. It needs lightning."""

import argparse
import os
from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.nn.functional import cross_entropy

import gradcomp

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--spec", default="topk:ratio=0.05", help="the compressor and its knobs (default topk:ratio=0.05)")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--folder", type=Path, default=Path("gradcomp-fabric"), help="of checkpoints")
parser.add_argument("--resume", action="store_true", help="go on from the checkpoint, with any number of ranks")
options = parser.parse_args()

fabric = Fabric(
    accelerator="auto" if torch.cuda.is_available() else "cpu", devices=int(os.environ.get("WORLD_SIZE", "2")), strategy="ddp"
)
fabric.launch()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), 0.01))
handle = gradcomp.ddp.attach(model._forward_module, options.spec)  # the one new line

state = {"model": model, "optimizer": optimizer, "step": 0}
if options.resume:
    state["step"] = fabric.load(options.folder / "trained.ckpt", {"model": model, "optimizer": optimizer})["step"]
    handle.load_state_dict([torch.load(file, weights_only=True) for file in options.folder.glob("rank-*.pt")])

for step in range(state["step"], options.steps):
    generator = torch.Generator().manual_seed(step * fabric.world_size + fabric.global_rank)
    x = torch.randn(32, 20, generator=generator).to(fabric.device)
    with fabric.no_backward_sync(model, enabled=step % 2 == 0):  # two passes for each step of the optimizer
        loss = cross_entropy(model(x), x[:, :5].argmax(1))
        fabric.backward(loss / 2)
    if step % 2:
        optimizer.step()
        optimizer.zero_grad()
    if (step + 1) % 50 == 0:
        fabric.print(f"step {step + 1}: loss {loss.item():.3f} on rank 0")

fabric.save(options.folder / "trained.ckpt", {**state, "step": options.steps})
torch.save(handle.state_dict(), options.folder / f"rank-{fabric.global_rank}.pt")  # each rank has a state of its own
fabric.print(f"{options.spec}: each rank sends {handle.stats()['compression']:.0f} times fewer bytes than dense gradients have")
fabric.barrier()  # with gloo, torch 2.13 may abort a rank that ends while its last operation is let go
torch.distributed.destroy_process_group()
