"""A loop with Accelerate, and one new line: torchrun --nproc-per-node 2 examples/accelerate_loop.py. It needs accelerate."""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from gradcomp.integrations.accelerate import attach

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--spec", default="topk:ratio=0.05", help="the compressor and its knobs (default topk:ratio=0.05)")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--folder", default="gradcomp-accelerate", help="of checkpoints")
parser.add_argument("--resume", action="store_true", help="go on from the checkpoint, with any number of ranks")
options = parser.parse_args()

accelerator = Accelerator(gradient_accumulation_steps=2, cpu=not torch.cuda.is_available())
handle = attach(accelerator, options.spec)  # the one new line, on all ranks, before prepare()

x = torch.randn(1600, 20, generator=torch.Generator().manual_seed(0))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
loader = DataLoader(TensorDataset(x, x[:, :5].argmax(1)), batch_size=8, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
if options.resume:
    accelerator.load_state(options.folder)

for epoch in range(options.epochs):
    for samples, labels in loader:
        with accelerator.accumulate(model):
            loss = cross_entropy(model(samples), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.print(f"epoch {epoch + 1}: loss {loss.item():.3f} on rank 0, {accelerator.ddp_handler.figures()}")
    accelerator.save_state(options.folder)  # with a file for each rank's state

# All states are there then. With gloo, torch 2.13 may abort a rank that ends while its last operation is let go.
accelerator.wait_for_everyone()
names = sorted(path.name for path in Path(options.folder).glob("gradcomp-*"))
accelerator.print(f"{options.folder} has {', '.join(names)}")
accelerator.end_training()
