"""What each rank of `bench.py traffic` runs: steps of every spec with random gradients, and what its interface sent."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import horovod.torch as hvd
import torch
from benchlib import traffic
from benchlib.ranks import PROGRESS, RESULT
from benchlib.traffic_report import CYCLE

import gradcomp
from gradcomp.engine.reducer import Reducer
from gradcomp.networks import Answer, Network
from gradcomp.networks.horovod import HorovodNetwork
from gradcomp.requests import Reply, Request

WARM = 3
"""Steps before those that count: Horovod remembers operations that have come before, and says less about them."""
IDLE = 4
"""Cycles of Horovod's in an idle step."""


class Counters(NamedTuple):
    """What this host's interface has sent so far."""

    bytes: int
    packets: int

    @classmethod
    def read(cls) -> Counters:
        folder = Path("/sys/class/net", os.environ["HOROVOD_GLOO_IFACE"], "statistics")
        return cls(*(int((folder / f"tx_{what}").read_text()) for what in ("bytes", "packets")))


class Noting:
    """A network that notes which operations go through it, in which order, so that they can be played again, hollow."""

    def __init__(self, network: Network):
        self.network, self.world = network, network.world
        self.calls: list[tuple[str, Request | None]] = []

    def start(self, request: Request, name: str) -> Answer:
        self.calls.append((name, traffic.hollow(request, self.world)))
        own = self.network.start(request, name)

        def answer() -> Reply:
            self.calls.append((name, None))
            return own()

        return answer

    def play(self) -> None:
        """The same operations in the same order, hollow."""
        under_way: dict[str, Answer] = {}
        for name, request in self.calls:
            if request is None:
                under_way.pop(name)()
            else:
                under_way[name] = self.network.start(request, "hollow." + name)


def measure(step: Callable[[], object], steps: int, counting: traffic.Counting) -> dict[str, float]:
    """What a step sends, by the interface and by the formula, and the seconds it takes."""
    for _ in range(WARM):
        step()
    counting.clear()
    hvd.barrier()
    before, began = Counters.read(), time.perf_counter()
    for _ in range(steps):
        step()
    seconds = time.perf_counter() - began
    hvd.barrier()  # so that nothing of this rank's is still waiting to be sent
    after, own = Counters.read(), counting.sent
    found = {"seconds": seconds, "wire": after.bytes - before.bytes, "packets": after.packets - before.packets}
    found |= {"bytes": own.bytes, "messages": own.messages, "framing": own.framing, "operations": counting.operations.total()}
    return {name: value / steps for name, value in found.items()}


def exchange(spec: str, size: int, steps: int) -> dict[str, dict[str, float]]:
    """A spec's steps on a model of this size; and hollow ones, which send all that is not the compressor's."""
    network = HorovodNetwork(hvd.global_process_set)
    network.prefix = spec
    counting = traffic.Counting(network)
    noting = Noting(counting)
    shapes = traffic.model(size)
    reducer = Reducer(gradcomp.make(spec), traffic.layers(shapes), counting, bucket_mb=25, seed=0, deliver=traffic.ignore)
    grads = traffic.random(shapes, hvd.rank())

    def step() -> None:
        for name, grad in grads.items():
            reducer.mark_ready(name, grad)
        reducer.finish_step()

    full = measure(step, steps, counting)
    reducer.network = noting
    step()
    return {"full": full, "hollow": measure(noting.play, steps, counting)}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("specs", nargs="+")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    hvd.init()
    found: dict[str, Any] = {}
    for spec in options.specs:
        if hvd.rank() == 0:
            print(PROGRESS + spec, flush=True)
        found[spec] = exchange(spec, options.size, options.steps)
    network = traffic.Counting(HorovodNetwork(hvd.global_process_set))
    found["idle"] = measure(lambda: time.sleep(IDLE * CYCLE), options.steps, network)
    ranks = hvd.allgather_object(found)
    if hvd.rank() == 0:
        result = {
            "idle": [rank.pop("idle") for rank in ranks],
            "specs": {spec: [rank[spec] for rank in ranks] for spec in options.specs},
        }
        print(RESULT + json.dumps(result), flush=True)
    hvd.barrier()  # a rank that is done would end Horovod for those that are not
    hvd.shutdown()


if __name__ == "__main__":
    main()
