"""A byte transformer with AdamW and bf16 autocast under DDP: torchrun --nproc-per-node 2 examples/transformer.py [--text FILE].

Without --text it reads Python's own documentation, which comes with Python.
"""

import argparse
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import gradcomp

CONTEXT, WIDTH = 64, 64


class Model(nn.Module):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, x: Tensor) -> Tensor:
        later = nn.Transformer.generate_square_subsequent_mask(CONTEXT, device=x.device)
        return self.head(self.layers(self.bytes(x) + self.places.weight, mask=later))


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--text", type=Path, help="a file to learn")
parser.add_argument("--steps", type=int, default=200)
options = parser.parse_args()

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
content = options.text.read_bytes() if options.text else "".join(topics.values()).encode()
text = torch.frombuffer(bytearray(content), dtype=torch.uint8).long()
own = text[len(text) * rank // ranks : len(text) * (rank + 1) // ranks]  # every rank has a part of its own
draw = torch.Generator().manual_seed(rank)

torch.manual_seed(0)
model = DistributedDataParallel(Model())
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
handle = gradcomp.ddp.attach(model, "topk")

losses = []
for step in range(1, options.steps + 1):
    starts = torch.randint(len(own) - CONTEXT, (16, 1), generator=draw)
    part = own[starts + torch.arange(CONTEXT + 1)]
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):  # weights and gradients stay in float32
        loss = cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 20 == 0 and rank == 0:
        print(f"step {step}: loss {sum(losses[-20:]) / 20:.3f} on rank 0", flush=True)
if rank == 0:
    print(f"each rank sends {handle.stats()['compression']:.0f} times fewer bytes than dense gradients have")
dist.barrier()  # with gloo, torch 2.13 may abort a rank that ends while its last operation is let go
dist.destroy_process_group()
