"""Exchanges given gradients by algorithms that are more than one gather, and reports the updates and the bytes. No operation is
of nothing or without a name."""

from __future__ import annotations

from typing import Any

import gradients
import horovod.torch as hvd
import ranks
import torch

import gradcomp


def watched(operation: Any) -> Any:
    """The operation, whose tensors must not be empty, in and out, and which must be named."""

    def start(tensor: torch.Tensor, **options: Any) -> Any:
        assert tensor.numel() > 0 and options["name"], f"{operation.__name__} of {tensor.numel()} entries"
        handle = operation(tensor, **options)
        started.append(handle)
        return handle

    return start


def waited_for(handle: Any) -> Any:
    answer = synchronize(handle)
    came = answer[0] if isinstance(answer, tuple) else answer
    assert came.numel() > 0 or handle not in started
    return answer


started: list[Any] = []
synchronize, hvd.synchronize = hvd.synchronize, waited_for
for name in ("alltoall_async", "allgather_async", "allreduce_async_"):
    setattr(hvd, name, watched(getattr(hvd, name)))

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
assert len(started) >= len(found) * asked["steps"]
ranks.report(found)
hvd.barrier()
