"""Ranks that leave and join under Horovod's elastic mode. Your script ./hosts.sh prints the hosts, one HOST:SLOTS a line.

horovodrun -np 2 --min-np 1 --max-np 4 --host-discovery-script ./hosts.sh --network-interface lo python examples/elastic.py

On several hosts, name their interface in place of lo. Without one, Horovod waits for a second host.
"""

import argparse

import horovod.torch as hvd
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import gradcomp

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--commit", type=int, default=10, help="steps between commits (default 10)")
options = parser.parse_args()

hvd.init()
truth = torch.randn(20, 5, generator=torch.Generator().manual_seed(0))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
optimizer = gradcomp.horovod.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters(), compression="topk:ratio=0.05"
)
losses: list[float] = []


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    """Train with the present ranks. Horovod calls it again whenever ranks have left or joined."""
    if hvd.rank() == 0:
        print(f"training from step {state.step} on, ranks: {hvd.size()}", flush=True)
    while state.step < options.steps:
        x = torch.randn(8, 20, generator=torch.Generator().manual_seed(1000 * state.step + hvd.rank()))
        optimizer.zero_grad()
        loss = cross_entropy(model(x), (x @ truth).argmax(1))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        state.step += 1
        if state.step % options.commit == 0:
            if hvd.rank() == 0:
                print(f"step {state.step}: loss {sum(losses[-10:]) / 10:.3f} on rank 0 of {hvd.size()}", flush=True)
            state.commit()  # what waits is committed with the optimizer


# The optimizer brings the residual along: no further code is needed.
train(hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0))
