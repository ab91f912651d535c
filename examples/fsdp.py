"""A byte transformer under FSDP2: torchrun --nproc-per-node 4 examples/fsdp.py FOLDER [--mesh shards|hybrid|replicate].

It has AdamW, accumulation, a clip, and checkpoints in FOLDER. The same command goes on, with more --steps, on any mesh.
"""

import argparse
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import gradcomp.fsdp

CONTEXT, WIDTH = 32, 64
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("folder", type=Path, help="the folder of checkpoints, one that all hosts see")
parser.add_argument("--mesh", choices=("shards", "hybrid", "replicate"), default="shards", help="hybrid: two shards")
parser.add_argument("--steps", type=int, default=200)
options = parser.parse_args()

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
shards = {"shards": ranks, "hybrid": 2, "replicate": 1}[options.mesh]
mesh = dist.init_device_mesh("cpu", (ranks // shards, shards), mesh_dim_names=("replicate", "shard"))
torch.manual_seed(0)
layers = [nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(2)]
model = nn.Sequential(nn.Embedding(256, WIDTH), *layers, nn.Flatten(), nn.Linear(CONTEXT * WIDTH, 256))
for part in (*layers, model):
    fully_shard(part, mesh=mesh)
handle = gradcomp.fsdp.attach(model, "blocks")  # the new line, on all ranks
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)


def states(step: int) -> dict:
    """Collect the states, shard by shard. dcp.load() writes into them."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer, "gradcomp": handle.state_dict(), "step": step}


if folders := sorted(options.folder.glob("step-*")):
    dcp.load(state := states(0), checkpoint_id=folders[-1])
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    handle.load_state_dict(state["gradcomp"])
began = state["step"] if folders else 0

text = torch.frombuffer(bytearray("".join(topics.values()).encode()), dtype=torch.uint8).long()  # Python's own documentation
losses = []
for step in range(began + 1, options.steps + 1):
    draw = torch.Generator().manual_seed(ranks * step + rank)  # other batches on each rank
    losses.append(0.0)
    for i in range(2):  # two batches a step
        model.set_requires_gradient_sync(i == 1)
        batch = text[torch.randint(len(text) - CONTEXT, (32, 1), generator=draw) + torch.arange(CONTEXT + 1)]
        loss = nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, -1]) / 2  # the next byte
        loss.backward()
        losses[-1] += loss.item()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 20 == 0 and rank == 0:
        print(f"step {step}: loss {sum(losses[-20:]) / 20:.3f} on rank 0", flush=True)
dcp.save(states(options.steps), checkpoint_id=options.folder / f"step-{options.steps:08}")
if rank == 0:
    print(f"each rank sends {handle.stats()['compression']:.1f} times fewer bytes than dense gradients have")
dist.barrier()  # with gloo, torch 2.13 may abort a rank that ends while its last operation is let go
dist.destroy_process_group()
