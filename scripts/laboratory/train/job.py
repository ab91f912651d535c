"""A rank of `lab train` and `lab compare`: trains on the digits under every spec in turns, and times each step."""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import gradcomp.horovod
from gradcomp.networks.horovod import HorovodNetwork
from gradcomp.requests import Reduce
from laboratory import ranks
from laboratory.options import BUILT_IN
from laboratory.tasks import digits
from laboratory.tasks.training import keeps_momentum
from laboratory.timing import rotated

# The learning rate.
RATE = 0.05

# Steps of each spec before the rounds that count.
WARM_UP = 2


class Job:
    """One spec's model and optimizer. The spec is part of every parameter's name, so that Horovod's caches are not shared."""

    def __init__(self, spec: str, data: digits.Digits, model: nn.Module, batch: int, momentum: float):
        self.spec = spec
        self.model = copy.deepcopy(model)  # a new one takes three times as long
        self.batches: Iterator[tuple[Tensor, Tensor]] = digits.batches(data, hvd.rank(), hvd.size(), batch)
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        local = spec not in BUILT_IN and keeps_momentum(spec)
        plain = torch.optim.SGD(self.model.parameters(), lr=RATE, momentum=0.0 if local else momentum)
        named = [(f"{spec}.{name}", parameter) for name, parameter in self.model.named_parameters()]
        self.bytes_sent: Callable[[], int] = lambda: {"none": 0, "sync": 0, "fp16": 2}.get(spec, 4) * self.parameters
        self.loss = 0.0
        self.optimizer: Any = plain
        self.network = HorovodNetwork(hvd.global_process_set)
        if spec == "horovod":
            self.optimizer = hvd.DistributedOptimizer(plain, named_parameters=named)
        elif spec == "fp16":
            self.optimizer = hvd.DistributedOptimizer(plain, named_parameters=named, compression=hvd.Compression.fp16)
        elif spec not in ("none", "sync"):
            self.optimizer = gradcomp.horovod.DistributedOptimizer(plain, named, compression=spec)
            self.bytes_sent = lambda: int(self.optimizer.stats()["bytes_sent"])

    def step(self) -> float:
        """Train one batch. Return the seconds."""
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

    def turn(self, steps: int) -> list[float]:
        """Time some steps, averaged over the ranks. Afterwards the gradients leave their memory to the next job."""
        hvd.barrier()
        own = torch.tensor([self.step() for _ in range(steps)], dtype=torch.float64)
        mean = hvd.allreduce(own, op=hvd.Average, name="times." + self.spec)
        self.optimizer.zero_grad()
        return [float(seconds) for seconds in mean]

    def most_bytes(self) -> int:
        """Return the bytes of the rank that sends most."""
        return int(hvd.allreduce(torch.tensor([self.bytes_sent()]), op=hvd.Max, name="bytes." + self.spec))


def timed(jobs: list[Job], rounds: int, steps: int, turn: float) -> dict[str, list[list[float]]]:
    """Return the seconds of each spec, round and step. The warm-up before them decides how many steps fit a turn."""
    found: dict[str, list[list[float]]] = {job.spec: [] for job in jobs}
    fitting: dict[str, int] = {}
    for at in range(rounds + 1):
        for done, i in enumerate(rotated(len(jobs), at)):
            job = jobs[i]
            if hvd.rank() == 0:
                stage = f"round {at}" if at else "warm-up"
                ranks.tell(f"{stage} of {rounds}, {job.spec}", (at * len(jobs) + done) / (len(jobs) * (rounds + 1)))
            seconds = job.turn(fitting[job.spec] if at else WARM_UP)
            if at:
                found[job.spec].append(seconds)
            else:
                fitting[job.spec] = max(1, min(steps, int(turn / seconds[-1])))
    return found


def measure() -> dict[str, Any]:
    """Time every spec on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("rounds", "steps", "width", "batch"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("momentum", "turn"):
        parser.add_argument(f"--{name}", type=float, required=True)
    parser.add_argument("specs", nargs="+")
    options = parser.parse_args()
    data, model = digits.load(), digits.model(width=options.width)
    jobs = [Job(spec, data, model, options.batch, options.momentum) for spec in options.specs]
    seconds = timed(jobs, options.rounds, options.steps, options.turn)
    return {
        "ranks": hvd.size(),
        "batch": options.batch,
        "parameters": jobs[0].parameters,
        "bytes_dense": 4 * jobs[0].parameters,
        "specs": {job.spec: {"rounds": seconds[job.spec], "bytes": job.most_bytes(), "loss": job.loss} for job in jobs},
    }


if __name__ == "__main__":
    ranks.horovod_job(measure)
