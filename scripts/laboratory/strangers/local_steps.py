"""Train a small transformer by local steps: python -m laboratory.strangers.local_steps SPEC FILE, on each rank of torchrun.

Without a spec ("") torchft's DiLoCo synchronizes, each rank a replica of its own; otherwise gradcomp's LocalSteps does, with
the same outer step.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore

import gradcomp
from laboratory.tasks import table
from laboratory.tasks.table import TASKS
from laboratory.tasks.task import clip, optimizer_of, rate_of

# The outer step, and the inner ones between two.
EVERY, RATE, MOMENTUM = 30, 0.7, 0.9
# In place of the task's own settings.
SETTINGS: dict[str, Any] = {"lr": 0.008, "steps": 3000, "batch": 4, "width": 64, "depth": 2}

# Takes a step; and the bytes that a rank has handed to the network.
Steps = tuple[Callable[[], Any], Callable[[], int]]


@contextlib.contextmanager
def by_gradcomp(spec: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Steps]:
    """Synchronize by gradcomp's LocalSteps."""
    options: dict[str, Any] = {"outer_lr": RATE, "outer_momentum": MOMENTUM}
    local = gradcomp.local.LocalSteps(model, optimizer, spec, sync_every=EVERY, **options)
    yield local.step, lambda: local.stats()["bytes_sent_total"]
    local.flush()


@contextlib.contextmanager
def by_torchft(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Steps]:
    """Synchronize by torchft's DiLoCo, each rank a replica group of its own."""
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    rank, ranks = dist.get_rank(), dist.get_world_size()
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=ranks) if rank == 0 else None
    address = [None if lighthouse is None else lighthouse.address()]
    dist.broadcast_object_list(address)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    of_replica: dict[str, Any] = {"rank": 0, "world_size": 1, "store_addr": "127.0.0.1", "store_port": store.port}
    manager = Manager(
        group := ProcessGroupGloo(timedelta(seconds=60)),
        model.load_state_dict,
        model.state_dict,
        min_replica_size=ranks,
        use_async_quorum=False,
        lighthouse_addr=address[0],
        replica_id=f"replica{rank}",
        hostname="127.0.0.1",
        init_sync=False,  # the weights are equal; otherwise the first round counts rank 0's progress alone
        **of_replica,
    )
    sent, allreduce = [0], group.allreduce

    def counted(tensors: list[Tensor], *arguments: Any) -> Any:
        sent[0] += sum(each.numel() * each.element_size() for each in tensors)
        return allreduce(tensors, *arguments)

    group.allreduce = counted
    outer = torch.optim.SGD(model.parameters(), RATE, MOMENTUM, nesterov=True)
    with DiLoCo(manager, [model], optimizer, outer, EVERY):
        yield optimizer.step, lambda: sent[0]
    dist.barrier()
    manager.shutdown(wait=False)
    if lighthouse is not None:
        lighthouse.shutdown()


def main(spec: str, file: str) -> None:
    """Train, and write what came out on rank 0."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    task = TASKS["python"]
    settings = task.defaults._replace(**SETTINGS)
    assert task.source is not None
    with tempfile.TemporaryDirectory() as folder:
        arrays = table.load(table.place(Path(folder), table.prepare("python", task.source, None, Path(folder))))
    job = task.make(settings, 0, ranks, arrays)
    optimizer = optimizer_of(task, settings, job.model)
    began = time.perf_counter()
    with by_gradcomp(spec, job.model, optimizer) if spec else by_torchft(job.model, optimizer) as (take_step, sent):
        for step in range(1, settings.steps + 1):
            optimizer.param_groups[0]["lr"] = rate_of(task, settings, step)
            x, y = next(job.batches[rank])
            optimizer.zero_grad()
            job.loss(job.model(x), y).backward()
            clip([each.grad for each in job.model.parameters() if each.grad is not None], settings.clip)
            take_step()
        found = {"bytes": sent(), "seconds": round(time.perf_counter() - began, 1)}
    if rank == 0:
        found["perplexity"] = round(job.score(), 4)
        Path(file).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
