"""What each rank of `bench.py train` and `compare.py` runs: the digits job under every spec in turn, each step timed."""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import digits
import horovod.torch as hvd
import torch
from benchlib.options import BUILT_IN
from benchlib.ranks import PROGRESS, RESULT
from benchlib.rounds import turned
from studylib.train import keeps_momentum
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import gradcomp.horovod
from gradcomp.networks.horovod import HorovodNetwork
from gradcomp.requests import Reduce

RATE = 0.05
WARM_UP = 2  # steps of each spec before those that count


class Job:
    """One spec's own model and optimizer. Names are its own too, so that Horovod's caches are not shared."""

    def __init__(self, spec: str, data: digits.Digits, model: nn.Module, batch: int, momentum: float):
        self.spec = spec
        self.model = copy.deepcopy(model)  # a fresh one takes three times as long
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

    def turn(self, steps: int) -> list[float]:
        """So many steps, timed; behind them its gradients leave their memory to the next job."""
        hvd.barrier()
        seconds = mean_over_ranks([self.step() for _ in range(steps)], "times." + self.spec)
        self.optimizer.zero_grad()
        return seconds


def mean_over_ranks(seconds: list[float], name: str) -> list[float]:
    """Every step's time, averaged over the ranks."""
    return [float(s) for s in hvd.allreduce(torch.tensor(seconds, dtype=torch.float64), op=hvd.Average, name=name)]


def measure(jobs: list[Job], rounds: int, steps: int, longest: float) -> dict[str, list[list[float]]]:
    """Seconds of each spec, round and step; a short round before them is not counted, but says how many steps fit a turn."""
    found: dict[str, list[list[float]]] = {job.spec: [] for job in jobs}
    fitting: dict[str, int] = {}
    for at in range(rounds + 1):
        for i in turned(len(jobs), at):
            job = jobs[i]
            if hvd.rank() == 0:
                print(f"{PROGRESS}{'round ' + str(at) if at else 'warm-up'} of {rounds}, {job.spec}", flush=True)
            seconds = job.turn(fitting[job.spec] if at else WARM_UP)
            if at:
                found[job.spec].append(seconds)
            else:
                fitting[job.spec] = max(1, min(steps, int(longest / seconds[-1])))
    return found


def of_the_busiest(sent: int, name: str) -> int:
    """What the rank that sends most sends."""
    return int(hvd.allreduce(torch.tensor([sent]), op=hvd.Max, name=name))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--width", type=int, default=digits.WIDTH)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--momentum", type=float, default=0.0)  # the optimizer's, where the spec keeps none
    parser.add_argument("--turn", type=float, default=1e9)  # seconds after which a spec's turn should be over
    parser.add_argument("specs", nargs="+")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    hvd.init()
    data = digits.load()
    model = digits.model(width=options.width)
    jobs = [Job(spec, data, model, options.batch, options.momentum) for spec in options.specs]
    seconds = measure(jobs, options.rounds, options.steps, options.turn)
    sent = {job.spec: of_the_busiest(job.bytes_sent(), "bytes." + job.spec) for job in jobs}
    result = {
        "ranks": hvd.size(),
        "batch": options.batch,
        "parameters": jobs[0].parameters,
        "bytes_dense": 4 * jobs[0].parameters,
        "specs": {job.spec: {"rounds": seconds[job.spec], "bytes": sent[job.spec], "loss": job.loss} for job in jobs},
    }
    if hvd.rank() == 0:
        print(RESULT + json.dumps(result), flush=True)
    hvd.barrier()  # a rank that is done would end Horovod for those that are not
    hvd.shutdown()


if __name__ == "__main__":
    main()
