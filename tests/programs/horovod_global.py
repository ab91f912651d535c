"""Exchanges given gradients by algorithms that are more than one gather, and reports the updates and the bytes."""

from __future__ import annotations

from typing import Any

import gradients
import horovod.torch as hvd
import ranks
import torch

import gradcomp

hvd.init()
asked = ranks.arguments()
found: dict[str, Any] = {}
for number, spec in enumerate(asked["specs"]):
    w = torch.nn.Parameter(torch.zeros(asked["n"]))
    plain = torch.optim.SGD([w], lr=0.0)
    optimizer = gradcomp.horovod.DistributedOptimizer(plain, [(f"w{number}", w)], compression=spec)
    updates = []
    for step in range(asked["steps"]):
        optimizer.zero_grad()
        (w * gradients.draw("heavy", asked["n"], 100 * step + hvd.rank())).sum().backward()
        optimizer.step()
        assert w.grad is not None
        updates.append(w.grad.clone())
    stats = optimizer.stats()
    found[spec] = {"updates": updates, "bytes": stats["bytes_sent"], "between": stats["bytes_between_hosts"]}
ranks.report(found)
hvd.barrier()
