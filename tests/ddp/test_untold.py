"""attach() without optimizer=, on two ranks: the first step() names the optimizer, and training is as if it had been told."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from ranks import join, launch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import gradcomp

# Steps until the directions of AdamW, which were compared with the mean of all ranks, are as long as torch's.
FROM, TO = 32, 64


def moved(told: bool) -> float:
    """Train on gradients of 0.3 signal and 1 noise, everything sent. Return the distance that the last steps moved weights."""
    torch.manual_seed(0)
    whole = DistributedDataParallel(nn.Linear(1000, 1, bias=False))
    optimizer = AdamW(whole.parameters(), 1e-3, weight_decay=0.0)
    gradcomp.ddp.attach(whole, "topk:ratio=1,wire=exact", optimizer=optimizer if told else None)
    draw, distance = torch.Generator().manual_seed(7 + dist.get_rank()), 0.0
    for step in range(TO):
        before = whole.module.weight.detach().clone()
        optimizer.zero_grad()
        given: Tensor = 0.3 + torch.randn(1, 1000, generator=draw)
        whole(given).sum().backward()
        optimizer.step()
        distance += float((whole.module.weight.detach() - before).norm()) if step >= FROM else 0.0
    return distance


def both() -> list[float]:
    join()
    warnings.simplefilter("ignore")
    return [moved(True), moved(False)]


def test_steps_are_as_long_without_the_optimizer_told() -> None:
    """The first exchange is of gradients there; without a comparison the steps were 0.76 times as long on two ranks."""
    for told, untold in launch(both, 2):
        assert abs(untold / told - 1) < 0.03, (told, untold)
