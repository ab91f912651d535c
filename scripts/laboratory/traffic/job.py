"""A rank of `lab traffic`: steps of every spec with random gradients, and the bytes that its interface sent."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import horovod.torch as hvd
import torch

import gradcomp
from gradcomp.core.requests import Reply, Request
from gradcomp.engine.steps.reducer import Reducer
from gradcomp.networks import Answer, Network
from gradcomp.networks.horovod import HorovodNetwork
from laboratory import ranks
from laboratory.traffic import formula
from laboratory.traffic.summary import CYCLE

# Steps before those that count: Horovod negotiates less about operations that it remembers.
WARM_UP = 3

# Cycles of Horovod in an idle step.
IDLE = 4


class Counters(NamedTuple):
    """Bytes and packets that this host's interface has sent so far."""

    bytes: int
    packets: int

    @classmethod
    def read(cls) -> Counters:
        """Read the kernel's counters."""
        folder = Path("/sys/class/net", os.environ["HOROVOD_GLOO_IFACE"], "statistics")
        return cls(*(int((folder / f"tx_{unit}").read_text()) for unit in ("bytes", "packets")))


class Recorder:
    """A network that records its operations in order, to play them again, hollow."""

    def __init__(self, network: Network):
        self.network, self.world = network, network.world
        self.calls: list[tuple[str, Request | None]] = []

    def start(self, request: Request, name: str) -> Answer:
        """Record a request, and pass it on."""
        self.calls.append((name, formula.hollow(request, self.world)))
        own = self.network.start(request, name)

        def answer() -> Reply:
            self.calls.append((name, None))
            return own()

        return answer

    def play(self) -> None:
        """Repeat the operations in the same order, hollow."""
        under_way: dict[str, Answer] = {}
        for name, request in self.calls:
            if request is None:
                under_way.pop(name)()
            else:
                under_way[name] = self.network.start(request, "hollow." + name)


def measure_step(step: Callable[[], object], steps: int, counting: formula.Counting) -> dict[str, float]:
    """Return what a step sends, by interface and by formula, and its seconds."""
    for _ in range(WARM_UP):
        step()
    counting.clear()
    hvd.barrier()
    before, began = Counters.read(), time.perf_counter()
    for _ in range(steps):
        step()
    seconds = time.perf_counter() - began
    hvd.barrier()  # until this rank has sent everything
    after, own = Counters.read(), counting.sent
    found = {"seconds": seconds, "wire": after.bytes - before.bytes, "packets": after.packets - before.packets}
    found |= {"bytes": own.bytes, "messages": own.messages, "framing": own.framing, "operations": counting.operations.total()}
    return {name: value / steps for name, value in found.items()}


def exchange(spec: str, size: int, steps: int) -> dict[str, dict[str, float]]:
    """Measure a spec's steps on a model of this size, and hollow ones, which send everything but the compressor's bytes."""
    network = HorovodNetwork(hvd.global_process_set)
    network.prefix = spec
    counting = formula.Counting(network)
    recorder = Recorder(counting)
    shapes = formula.model(size)
    reducer = Reducer(gradcomp.make(spec), formula.layers(shapes), counting, bucket_mb=25, seed=0, deliver=formula.ignore)
    grads = formula.random(shapes, hvd.rank())

    def step() -> None:
        for name, grad in grads.items():
            reducer.mark_ready(name, grad)
        reducer.finish_step()

    full = measure_step(step, steps, counting)
    reducer.network = recorder
    step()
    return {"full": full, "hollow": measure_step(recorder.play, steps, counting)}


def measure() -> dict[str, Any]:
    """Measure every spec on the command line, and idle steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("specs", nargs="+")
    options = parser.parse_args()
    torch.set_num_threads(1)
    own: dict[str, Any] = {}
    for done, spec in enumerate(options.specs):
        if hvd.rank() == 0:
            ranks.tell(spec, done / len(options.specs))
        own[spec] = exchange(spec, options.size, options.steps)
    network = formula.Counting(HorovodNetwork(hvd.global_process_set))
    idle = measure_step(lambda: time.sleep(IDLE * CYCLE), options.steps, network)
    of_ranks = hvd.allgather_object((idle, own))
    return {
        "idle": [idle for idle, _ in of_ranks],
        "specs": {spec: [found[spec] for _, found in of_ranks] for spec in options.specs},
    }


if __name__ == "__main__":
    ranks.horovod_job(measure)
