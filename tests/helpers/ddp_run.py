"""A model in DistributedDataParallel, with gradcomp's hook or without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import small_net
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradcomp

ALONE, EXACT, SPARSE = None, "topk:ratio=1,wire=exact", "topk:ratio=0.05"
BUCKET_MB = 0.02


class DdpRun:
    """A model in DDP, with a handle where there is a spec."""

    def __init__(self, spec: str | None, plain: nn.Module | None = None, lr: float = 0.02, **options: Any):
        self.plain = small_net.net() if plain is None else plain
        self.optimizer = torch.optim.SGD(self.plain.parameters(), lr)
        self.whole = DistributedDataParallel(self.plain, bucket_cap_mb=BUCKET_MB, **options)
        if spec is not None:
            self.handle = gradcomp.ddp.attach(self.whole, spec, optimizer=self.optimizer, bucket_mb=BUCKET_MB)
        self.data = small_net.examples(dist.get_rank())

    def backward(self, **options: Any) -> None:
        small_net.backward(self.whole, next(self.data), **options)

    def train(self, steps: int, skip: Callable[[int], bool] = lambda step: False) -> Tensor:
        for step in range(steps):
            self.optimizer.zero_grad()
            self.backward(**({"skip": True} if skip(step) else {}))
            self.optimizer.step()
        return self.weights

    @property
    def weights(self) -> Tensor:
        return small_net.weights(self.plain)
