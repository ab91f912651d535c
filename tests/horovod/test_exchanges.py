"""Exchanges on real ranks give the simulator's updates, to the last bit. No operation is empty or unnamed."""

from __future__ import annotations

from typing import Any

import gradients
import horovod.torch as hvd
import pytest
import ranks
import reference
import torch

import gradcomp

pytestmark = pytest.mark.slow

N, STEPS = 20_000, 3
SENT = [
    "gtopk:ratio=0.01",
    "sketched_sgd:ratio=0.005",
    "sketched_sgd:ratio=0.005,candidates=1",
    "topk:ratio=0.01,route=split",
    "topk:ratio=0.01,route=tree",
    "sdagc:lam=2,small=none,route=split,wire=exact",
    "sdagc:lam=2,small=none,route=tree",
    "orq:group=512,route=alltoall",
    "orq:sigmas=1.5,group=512,route=alltoall",
    "bingrad:group=512",
    "qsgd:levels=9,group=128,route=allgather",
]
REDUCED = [
    "gs_sgd:ratio=0.005",
    "gs_sgd:ratio=0.005,candidates=1",
    "lgc:dense=1,learn=1,ratio=0.01",
    "lgc:dense=1,learn=1,ratio=0.01",
    "lgc:dense=1,learn=1,ratio=0.01,instance=server",
]
BY_HOST = [
    "topk:ratio=0.01,by_host=true",
    "topk:ratio=0.01,route=split,momentum=0.9,by_host=true",
    "sdagc:lam=2,small=none,by_host=true",
    "gs_sgd:ratio=0.005,by_host=true",
    "dense:by_host=true",
    "bingrad:form=pb,group=512,by_host=true",
]
# Spec, ranks, and hosts with equally many of them.
ROUNDS = [(spec, 3, 1) for spec in SENT + REDUCED] + [(spec, 4, 2) for spec in BY_HOST]


class Watch:
    """Horovod's operations, each of which must have a name, and entries to send and to receive."""

    def __init__(self) -> None:
        self.started: list[Any] = []
        self.synchronize = hvd.synchronize
        hvd.synchronize = self.waited_for
        for name in ("alltoall_async", "allgather_async", "allreduce_async_"):
            setattr(hvd, name, self.watched(getattr(hvd, name)))

    def watched(self, operation: Any) -> Any:
        def start(tensor: torch.Tensor, **options: Any) -> Any:
            assert tensor.numel() > 0 and options["name"], f"{operation.__name__} of {tensor.numel()} entries"
            handle = operation(tensor, **options)
            self.started.append(handle)
            return handle

        return start

    def waited_for(self, handle: Any) -> Any:
        answer = self.synchronize(handle)
        came = answer[0] if isinstance(answer, tuple) else answer
        assert came.numel() > 0 or handle not in self.started
        return answer


def program(specs: list[str]) -> dict[str, Any]:
    """Exchange given gradients with each spec; return the updates and the bytes."""
    watch = Watch()
    hvd.init()
    found: dict[str, Any] = {}
    for number, spec in enumerate(specs):
        w = torch.nn.Parameter(torch.zeros(N))
        plain = torch.optim.SGD([w], lr=0.1)
        optimizer = gradcomp.horovod.DistributedOptimizer(plain, [(f"w{number}", w)], compression=spec)
        updates = []
        for step in range(STEPS):
            optimizer.zero_grad()
            (w * gradients.draw("heavy", N, 100 * step + hvd.rank())).sum().backward()
            optimizer.step()
            assert w.grad is not None
            updates.append(w.grad.clone())
        stats = optimizer.stats()
        found[spec] = {"updates": updates, "bytes": stats["bytes_sent"], "between": stats["bytes_between_hosts"]}
    assert len(watch.started) >= len(found) * STEPS
    return found


@ranks.once
def found(world: int, hosts: int) -> list[dict[str, Any]]:
    specs = [spec for spec, *where in ROUNDS if where == [world, hosts]]
    return ranks.launch(program, world, specs, hosts=hosts)


@pytest.mark.parametrize("spec,world,hosts", ROUNDS)
def test_real_ranks_do_what_simulated_ones_do(spec: str, world: int, hosts: int) -> None:
    simulation = gradcomp.Simulation(spec, {"w": (N,)}, world, ranks_per_host=world // hosts)
    for step in range(STEPS):
        update = simulation.step([{"w": gradients.draw("heavy", N, 100 * step + rank)} for rank in range(world)])["w"]
        real = [rank[spec]["updates"][step] for rank in found(world, hosts)]
        assert all(reference.same(own, real[0]) for own in real)
        if spec not in REDUCED:
            assert reference.same(real[0], update)
        else:
            torch.testing.assert_close(real[0], update, rtol=1e-4, atol=1e-4)  # a reduction adds in an order of its own
    assert [rank[spec]["bytes"] for rank in found(world, hosts)] == simulation.bytes_sent
    if hosts > 1:
        between = [rank[spec]["between"] for rank in found(world, hosts)]
        assert between == [reducer.bytes_between_hosts for reducer in simulation._reducers]
        assert spec.startswith("dense") or max(between) < min(simulation.bytes_sent) / 10
