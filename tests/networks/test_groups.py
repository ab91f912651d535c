"""A group of torch.distributed that is made anew: with one process that stayed and one that is new, or in the same store."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_server import FOLDER
from ranks import launch
from torch.nn.parallel import DistributedDataParallel

import gradcomp

pytestmark = pytest.mark.slow

PROGRAM = """
import os, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import gradcomp

rank, groups = int(sys.argv[1]), sys.argv[2:]
for group in groups:
    dist.init_process_group("gloo", init_method=f"file://{group}", rank=rank, world_size=2)
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    gradcomp.ddp.attach(model, "dense")
    model(torch.ones(2, 4)).sum().backward()
    dist.destroy_process_group()
os._exit(0)  # torch's threads and the process end in no fixed order, and now and then abort it
"""


def test_a_process_that_stayed_meets_a_new_one(tmp_path: Path) -> None:
    groups = [str(tmp_path / name) for name in ("first", "second")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def start(rank: int, *of: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", PROGRAM, str(rank), *of], env=environment, stdout=subprocess.DEVNULL)

    with start(0, *groups) as stays:
        try:
            for group in groups:
                with start(1, group) as new:
                    try:
                        assert new.wait(120) == 0
                    finally:
                        new.kill()
            assert stays.wait(120) == 0
        finally:
            stays.kill()


def in_one_store() -> list[int]:
    """Make the group twice, as under torchrun, whose store stays: with other numbers of operations before a meeting."""
    rank, size = (int(os.environ[f"HOROVOD_{name}"]) for name in ("RANK", "SIZE"))
    stays, steps = dist.FileStore(f"{os.environ[FOLDER]}/stays", size), []
    for generation, count in enumerate((3, 1)):
        path = f"{os.environ[FOLDER]}/{generation}"
        dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)
        setattr(dist.distributed_c10d, "_get_default_store", lambda: stays)  # noqa: B010 - torch does not export it
        model = DistributedDataParallel(torch.nn.Linear(4, 4))
        handle = gradcomp.ddp.attach(model, "dense")
        for _ in range(count):
            model(torch.ones(2, 4)).sum().backward()
        time.sleep(rank)
        handle.change("half")
        steps.append(handle.stats()["steps"])
        dist.barrier()
        dist.destroy_process_group()
    return steps


def test_a_group_that_is_made_anew_reads_nothing_that_the_one_before_left_in_the_store() -> None:
    assert launch(in_one_store, 2) == [[3, 1]] * 2
