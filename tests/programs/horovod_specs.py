"""Trains with every kind of spec: sdagc and its parts, rules by layer, a learning rate that falls, and changes of spec."""

from __future__ import annotations

import itertools
from typing import Any

import horovod.torch as hvd
import ranks
import torch
import training

hvd.init()
asked = ranks.arguments()
found: dict[Any, Any] = {}
count = itertools.count()


def optimizer(route: str, model: torch.nn.Module, spec: str) -> Any:
    return training.sgd(route, model, spec, bucket_mb=0.02, prefix=f"{next(count)}.")


def trained(route: str, spec: str, again: bool) -> torch.Tensor:
    """24 steps, with a falling learning rate; again: saved after 12 and continued by new objects."""
    model, data = training.net(), training.batches()
    own = optimizer(route, model, spec)
    number = next(count) - 1
    for step in range(24):
        if again and step == 12:
            saved = model.state_dict(), own.compression.state_dict()
            model = training.net(seed=2)
            own = training.sgd(route, model, spec, bucket_mb=0.02, prefix=f"{number}.")
            model.load_state_dict(saved[0])
            own.compression.load_state_dict(saved[1])
        own.param_groups[0]["lr"] = 0.02 if step < 8 else 0.01 if step < 16 else 0.005
        own.zero_grad()
        training.backward(model, next(data), skip=(step + hvd.rank()) % 5 == 0)
        own.step()
    return training.weights(model)


def changed(route: str) -> dict[str, Any]:
    """From top-k to sdagc after ten steps."""
    model, data = training.net(), training.batches()
    own = optimizer(route, model, "topk:ratio=0.01")
    training.train(model, own, data, 10)
    before = own.compression.state_dict()["rank"]["residual"]
    own.compression.change("sdagc:lam=2")
    after = own.compression.state_dict()["rank"]["residual"]
    weights = training.train(model, own, data, 10)
    return {
        "carried": all(torch.equal(before[name], after[name]) for name in before),
        "something": any(bool(left.any()) for left in before.values()),
        "weights": weights,
        "steps": own.compression.stats()["steps"],
    }


def changed_on_one_rank(route: str) -> str:
    model, data = training.net(), training.batches()
    own = optimizer(route, model, "topk:ratio=0.01")
    training.train(model, own, data, 2)
    return training.refused(lambda: own.compression.change("sdagc:lam=2" if hvd.rank() == 1 else "topk:ratio=0.02"))


def without_optimizer() -> str:
    return training.refused(
        lambda: training.gradcomp.horovod.Compression(
            "sdagc:lr_revision=keep", training.named(training.net(), f"{next(count)}.")
        )
    )


for route in training.ROUTES:
    for spec in asked["specs"]:
        for again in (False, True):
            found["trained", route, spec, again] = trained(route, spec, again)
    found["changed", route] = changed(route)
    found["one", route] = changed_on_one_rank(route)
found["without"] = without_optimizer()
ranks.report(found)
hvd.barrier()
