"""A worker of a training in which rank 1 is late, fails or acts alone: python -m lonely_worker FOLDER CASE.

Under horovodrun it takes gradcomp's DistributedOptimizer, under torchrun DDP. It leaves FOLDER/RANK.json: the error of its last
step or call, and the seconds until then.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import doors
import horovod.torch as hvd
import small_net
import torch.distributed as dist
from ddp_run import SPARSE, DdpRun
from torch import nn

# Seconds by which rank 1 is late: a rank that waits speaks after 10.
LATE = 12
# Seconds for which a rank stays after its report: the launcher ends all others when one has ended with an error.
STAYS = 40


class HorovodRun:
    """A training by gradcomp's DistributedOptimizer, with the methods of DdpRun."""

    def __init__(self) -> None:
        self.model, self.data = small_net.net(), doors.batches()
        self.optimizer = doors.sgd(doors.OWN, self.model, SPARSE, bucket_mb=0.015)
        self.handle = self.optimizer.compression

    def train(self, steps: int) -> Any:
        return small_net.train(self.model, self.optimizer, self.data, steps)


def fail(run: Any) -> None:
    """End a step before all gradients are exchanged. gradcomp sees that within step()."""
    run.optimizer.zero_grad()
    if isinstance(run, DdpRun):
        run.plain.second.register_full_backward_hook(_raise)
        small_net.refused(run.backward)
    else:
        small_net.backward(run.model, next(run.data))
        nn.utils.clip_grad_norm_(run.model.parameters(), 1e-3)
    run.optimizer.step()


def _raise(module: nn.Module, given: Any, out: Any) -> None:
    raise KeyError("forced")


# What rank 1 does.
CASES: dict[str, Callable[[Any], Any]] = {
    "late": lambda run: (time.sleep(LATE), run.train(1)),
    "fails": fail,
    "changes": lambda run: run.handle.change("sdagc"),
}


def main(folder: Path, case: str) -> None:
    logging.basicConfig()
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    if under_torchrun:
        dist.init_process_group("gloo")
        rank, run = dist.get_rank(), DdpRun(SPARSE)
    else:
        hvd.init()
        rank, run = hvd.rank(), HorovodRun()
    run.train(3)
    dist.barrier() if under_torchrun else hvd.barrier()
    began = time.monotonic()
    steps = 2 if case == "fails" else 1  # under Horovod, a step that fails has exchanged all that rank 0 needs for its own
    said = small_net.refused(lambda: CASES[case](run) if rank == 1 else run.train(steps))
    (folder / f"{rank}.new").write_text(json.dumps({"said": said, "seconds": time.monotonic() - began}))
    (folder / f"{rank}.new").rename(folder / f"{rank}.json")
    until = time.monotonic() + STAYS
    while not all((folder / f"{each}.json").exists() for each in range(2)) and time.monotonic() < until:
        time.sleep(0.1)
    time.sleep(1)  # the launcher is to see none end before all have reported
    os._exit(0)  # there may be operations under way


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
