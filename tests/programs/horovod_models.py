"""Models of unusual make. Each is trained by hand first: every gradient averaged by hvd.allreduce, then a plain optimizer."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import ranks
import torch
import training
from odd_models import KEPT, MODELS, make, step
from torch import Tensor

hvd.init()
STEPS = 4


def by_hand(name: str) -> Tensor:
    """bfloat16, which Horovod does not take, and anything else: averaged in float32, one gradient after the other."""
    model = make(name)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for turn in range(STEPS):
        optimizer.zero_grad()
        step(model, turn, hvd.rank())
        for n, p in model.named_parameters():
            if p.grad is not None and p.numel():
                p.grad.copy_(hvd.allreduce(p.grad.float().contiguous(), name=f"by hand.{n}", op=hvd.Average))
        optimizer.step()
    return training.weights(model)


def through(name: str, route: str, spec: str) -> tuple[Tensor, list[str]]:
    model = make(name)
    optimizer = training.sgd(route, model, spec, lr=0.1, prefix=f"{name}/{route}/{spec}.")
    for turn in range(STEPS):
        optimizer.zero_grad()
        step(model, turn, hvd.rank())
        optimizer.step()
    return training.weights(model), [str(p.dtype) for p in model.parameters()]


def waiting(name: str, route: str) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """After one step, by parameter: what this rank has not sent, its own gradient, and the update."""
    alone, model = make(name), make(name)
    step(alone, 0, hvd.rank())
    optimizer = training.sgd(route, model, "topk:ratio=0.05", prefix="")
    step(model, 0, hvd.rank())
    optimizer.step()
    local, updated, kept = dict(alone.named_parameters()), dict(model.named_parameters()), optimizer.compression.residual()
    return {n: (kept[n], local[n].grad, updated[n].grad) for n in kept}  # type: ignore[misc]


found: dict[Any, Any] = {}
for name in MODELS:
    found[name] = by_hand(name)
    for route in training.ROUTES:
        for spec in ("dense", "topk:ratio=1,wire=exact", "topk:ratio=0.05"):
            found[name, route, spec] = through(name, route, spec)
for name in KEPT:
    for route in training.ROUTES:
        found["waiting", name, route] = waiting(name, route)
model = make("bfloat16")
found["stock bfloat16"] = training.refused(lambda: step(model, training.sgd(training.STOCK, model) and 0, 0))
ranks.report(found)
hvd.barrier()
