"""Asks for what cannot work, one thing after the other on all ranks, and reports what was said to each."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import ranks
import torch
import training
from torch import nn

import gradcomp

hvd.init()
MOMENTUM = "topk:ratio=0.1,momentum=0.9"


def linear(prefix: str) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def embedding(prefix: str) -> nn.Module:
    return nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 3))


def step(model: nn.Module, optimizer: Any) -> None:
    x = torch.tensor([hvd.rank(), 3]) if isinstance(model[0], nn.Embedding) else torch.ones(2, 4, dtype=model[0].weight.dtype)
    model(x).sum().backward()
    optimizer.step()


def options(make: Callable[[str], nn.Module] = linear, **stock_options: Any) -> Callable[[str, str], None]:
    def action(route: str, prefix: str) -> None:
        model = make(prefix)
        step(model, training.sgd(route, model, "topk:ratio=0.1", prefix=prefix, **stock_options))

    return action


def unnamed(route: str, prefix: str) -> None:
    model = linear(prefix)
    named, optimizer = training.named(model, prefix), torch.optim.SGD(model.parameters(), 0.1)
    if route == training.OWN:
        gradcomp.horovod.DistributedOptimizer(optimizer, named[1:], "topk")
    else:
        compression = gradcomp.horovod.Compression("topk", named[1:])
        step(model, hvd.DistributedOptimizer(optimizer, named, compression=compression))


def thawed(route: str, prefix: str) -> None:
    model = linear(prefix)
    model[0].weight.requires_grad_(False)
    compression = gradcomp.horovod.Compression("topk", training.named(model, prefix))
    model[0].weight.requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step(model, hvd.DistributedOptimizer(optimizer, training.named(model, prefix), compression=compression))


def twice(route: str, prefix: str) -> None:
    model = linear(prefix)
    named = [("same", parameter) for parameter in model.parameters()]
    training.wrapped(route, torch.optim.SGD(model.parameters(), 0.1), named, "topk")


def momentum(route: str, prefix: str) -> None:
    training.sgd(route, linear(prefix), MOMENTUM, prefix=prefix, momentum=0.9)


def unseen_momentum(route: str, prefix: str) -> None:
    """Without optimizer= it can only be warned of."""
    gradcomp.horovod.Compression(MOMENTUM, training.named(linear(prefix), prefix))


CASES = {
    "adasum": options(op=hvd.Adasum),
    "min": options(op=hvd.Min),
    "max": options(op=hvd.Max),
    "product": options(op=hvd.Product),
    "sparse": options(embedding),
    "sparse as dense": options(embedding, sparse_as_dense=True),
    "float64": options(lambda prefix: linear(prefix).double()),
    "unnamed": unnamed,
    "thawed": thawed,
    "two of one name": twice,
    "momentum twice": momentum,
    "momentum unseen": unseen_momentum,
}
found = {}
for case, action in CASES.items():
    for route in training.ROUTES:
        with warnings.catch_warnings():
            if "sparse" in case:
                warnings.simplefilter("ignore")  # torch's own, on making sparse tensors
            found[case, route] = training.refused(lambda a=action, r=route, c=case: a(r, f"{c}/{r}."))  # type: ignore[misc]
model = training.net()  # after all that, training works
last = training.train(model, training.sgd("B", model, "topk:ratio=0.01"), training.batches(), 3)
ranks.report({"found": found, "weights": last})
hvd.barrier()
