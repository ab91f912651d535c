"""What each rank of `bench.py train` runs: the digits job under every spec in turn, in rounds, timed step by step."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import digits
import horovod.torch as hvd
import torch
from benchlib.ranks import PROGRESS, RESULT
from benchlib.rounds import turned
from torch import Tensor
from torch.nn.functional import cross_entropy

import gradcomp.horovod
from gradcomp.core import Reduce

BATCH, RATE = 64, 0.05


class Job:
    """One spec's own model and optimizer. Names are its own too, so that Horovod's caches are not shared."""

    def __init__(self, spec: str, data: digits.Digits, width: int):
        self.spec = spec
        self.model = digits.model(width=width)
        self.batches: Iterator[tuple[Tensor, Tensor]] = digits.batches(data, hvd.rank(), hvd.size(), BATCH)
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        plain = torch.optim.SGD(self.model.parameters(), lr=RATE)
        named = [(f"{spec}.{name}", parameter) for name, parameter in self.model.named_parameters()]
        self.bytes_sent: Callable[[], int] = lambda: {"none": 0, "sync": 0, "fp16": 2}.get(spec, 4) * self.parameters
        self.loss = 0.0
        self.optimizer: Any = plain
        self.network = gradcomp.horovod.Network(hvd.global_process_set)
        if spec == "horovod":
            self.optimizer = hvd.DistributedOptimizer(plain, named_parameters=named)
        elif spec == "fp16":
            self.optimizer = hvd.DistributedOptimizer(plain, named_parameters=named, compression=hvd.Compression.fp16)
        elif spec not in ("none", "sync"):
            self.optimizer = gradcomp.horovod.DistributedOptimizer(plain, named, compression=spec)
            self.bytes_sent = lambda: int(self.optimizer.stats()["bytes_sent"])

    def step(self) -> float:
        """Trains one batch; returns the seconds it took."""
        x, y = next(self.batches)
        began = time.perf_counter()
        self.optimizer.zero_grad()
        loss = cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        if self.spec == "sync":
            self.network.start(Reduce(torch.zeros(1)), "sync")()
        self.loss = loss.item()
        return time.perf_counter() - began


def mean_over_ranks(seconds: list[float], name: str) -> list[float]:
    """Every step's time, averaged over the ranks."""
    return [float(s) for s in hvd.allreduce(torch.tensor(seconds, dtype=torch.float64), op=hvd.Average, name=name)]


def measure(jobs: list[Job], rounds: int, steps: int) -> dict[str, list[list[float]]]:
    """Seconds of each spec, round and step; a short round before them is not counted."""
    found: dict[str, list[list[float]]] = {job.spec: [] for job in jobs}
    for at in range(rounds + 1):
        for i in turned(len(jobs), at):
            job = jobs[i]
            if hvd.rank() == 0:
                print(f"{PROGRESS}{'round ' + str(at) if at else 'warm-up'} of {rounds}, {job.spec}", flush=True)
            hvd.barrier()
            seconds = [job.step() for _ in range(steps if at else 2)]
            hvd.barrier()
            if at:
                found[job.spec].append(mean_over_ranks(seconds, "times." + job.spec))
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--width", type=int, default=digits.WIDTH)
    parser.add_argument("specs", nargs="+")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    hvd.init()
    data = digits.load()
    jobs = [Job(spec, data, options.width) for spec in options.specs]
    seconds = measure(jobs, options.rounds, options.steps)
    result = {
        "ranks": hvd.size(),
        "batch": BATCH,
        "parameters": jobs[0].parameters,
        "bytes_dense": 4 * jobs[0].parameters,
        "specs": {job.spec: {"rounds": seconds[job.spec], "bytes": job.bytes_sent(), "loss": job.loss} for job in jobs},
    }
    if hvd.rank() == 0:
        print(RESULT + json.dumps(result), flush=True)
    hvd.barrier()  # a rank that is done would end Horovod for those that are not
    hvd.shutdown()


if __name__ == "__main__":
    main()
