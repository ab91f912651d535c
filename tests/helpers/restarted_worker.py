"""A worker of a DDP training with known gradients, started by torchrun: python -m restarted_worker FOLDER SPEC LAST [KILL].

The lines between "saves" and "loads" are those of docs/checkpoints.md. The learning rate is 1: weights tell the sum of updates.
KILL: the step in which the highest rank ends itself by SIGKILL, unless it was started again.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradcomp

# Steps between checkpoints.
EVERY = 5


class Two(nn.Module):
    """Two layers that compute nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(40, 30)), nn.Parameter(torch.zeros(30))

    def forward(self, drawn: list[Tensor]) -> Tensor:
        return (self.a * drawn[0]).sum() + (self.b * drawn[1]).sum()


def gradients(rank: int, step: int, ranks: int) -> list[Tensor]:
    """Draw a rank's gradients in a step."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * ranks + rank)
    return [torch.randn(shape, generator=generator) for shape in ((40, 30), (30,))]


def main(folder: Path, spec: str, last: int, kill: int) -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(Two())
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    handle = gradcomp.ddp.attach(model, spec, optimizer=optimizer)
    # loads
    step = 0
    for checkpoint in sorted(folder.glob("step-*"), reverse=True):
        states = [torch.load(file, weights_only=True) for file in checkpoint.glob("*.pt")]
        if states and len(states) == states[0]["handle"]["ranks"]:  # every rank's
            model.load_state_dict(states[0]["model"])
            optimizer.load_state_dict(states[0]["optimizer"])
            handle.load_state_dict([state["handle"] for state in states])
            step = states[0]["step"]
            break
    began = step
    while step < last:
        optimizer.zero_grad()
        model(gradients(rank, step, ranks)).backward()
        if step == kill and rank == ranks - 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        step += 1
        if step % EVERY == 0:
            # saves
            checkpoint = folder / f"step-{step:08}"
            checkpoint.mkdir(exist_ok=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save({**state, "handle": handle.state_dict()}, checkpoint / f"{rank}.new")
            (checkpoint / f"{rank}.new").rename(checkpoint / f"{rank}.pt")
    if rank == 0:
        with (folder / "began").open("a") as file:
            file.write(json.dumps([ranks, began, last]) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def arguments(given: list[str]) -> Any:
    return Path(given[0]), given[1], int(given[2]), int(given[3]) if len(given) > 3 else -1


if __name__ == "__main__":
    main(*arguments(sys.argv[1:]))
