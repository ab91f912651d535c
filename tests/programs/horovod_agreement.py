"""Ranks that differ in one term after another, what each rank is told, and training across a new start of Horovod."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import ranks
import torch
import training
from torch import nn

import gradcomp
from gradcomp import _version

hvd.init()
odd = hvd.rank() == 1
found: dict[Any, Any] = {}
SPEC = "topk:ratio=0.05"


def step(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def differing(term: str, route: str) -> None:
    """On rank 1 one thing is other than on the rest."""
    torch.manual_seed(1)
    width = 5 if term == "shapes" and odd else 3
    model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2))
    if term == "layout" and odd:
        model[0].weight = nn.Parameter(model[0].weight.detach().t().contiguous().t())
    spec = "topk:ratio=0.06" if term == "spec" and odd else "lgc" if term == "state" else SPEC
    options: dict[str, Any] = {"bucket_mb": 3 if term == "bucket_mb" and odd else 2, "seed": 8 if term == "seed" and odd else 7}
    named = training.named(model, f"{term}/{route}{'x' if term == 'names' and odd else ''}.")
    if term == "count" and odd:
        model[1].bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    true, _version.VERSION = _version.VERSION, "9.9" if term == "version" and odd else _version.VERSION
    try:
        if route == training.OWN:
            own = gradcomp.horovod.DistributedOptimizer(optimizer, named, spec, **options)
        else:
            compression = gradcomp.horovod.Compression(spec, named, **options)
            own = hvd.DistributedOptimizer(optimizer, named, compression=compression)
        if term == "state" and odd:
            kept = own.compression if route == training.OWN else compression
            state = kept.state_dict()
            state["rank"]["buckets"][0]["own"]["inner"]["phases"]["steps"] = 5
            kept.load_state_dict(state)
        step(model, own)
    finally:
        _version.VERSION = true


for term in ("spec", "version", "seed", "bucket_mb", "names", "shapes", "layout", "count", "state"):
    for route in training.ROUTES:
        found[term, route] = training.refused(lambda t=term, r=route: differing(t, r))  # type: ignore[misc]
        hvd.barrier()

runs = {}
for route in training.ROUTES:
    for name in ("broken", "whole"):
        model = training.net()
        optimizer = training.sgd(route, model, SPEC, prefix=f"{name}/{route}.", bucket_mb=0.015)
        runs[name, route] = (model, optimizer, training.batches())
for (name, _), run in runs.items():
    training.train(*run, steps=10 if name == "broken" else 20)
hvd.barrier()
ranks.start_anew()
for (name, route), run in runs.items():
    found["weights", name, route] = training.train(*run, steps=10 if name == "broken" else 0)
hvd.barrier()
ranks.start_anew()
for (name, route), (model, optimizer, data) in runs.items():
    if odd:
        optimizer.compression._session.spec = "another"
    again = training.refused(lambda m=model, o=optimizer, d=data: training.train(m, o, d, 1))  # type: ignore[misc]
    found["again", name, route] = again
    hvd.barrier()
ranks.report(found)
hvd.barrier()
