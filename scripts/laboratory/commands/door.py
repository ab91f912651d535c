"""Measure what DDP's door costs the host: backward, and backward and step, of a model of many small layers, over DDP's own.

One rank over gloo, so that nothing but the host's work is timed. Each way has a model of its own, and all take turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import gradcomp
from gradcomp.engine.reducer import BUCKETS_OF_UPDATES
from laboratory import machine, options, report, timing
from laboratory.timing import Case, clock, interleave, threads

SPECS = "dense;topk;sdagc;orq"
# The model, and the number of DDP's buckets that it is cut to. gradcomp's of gradients are no larger than those, and come to a
# few more; those of updates are as few as a large model's.
LAYERS, ENTRIES, DDP_BUCKETS = 148, 256, 19
MODEL_MB = LAYERS * 4 * ENTRIES / 1e6
BUCKET_MB = MODEL_MB / DDP_BUCKETS
# Rounds before those that count: the first exchanges copy the state, and DDP makes its buckets anew after the first.
SETTLING = 20
# The ways without gradcomp: DDP's own exchange, and its hook that rounds to 16 bits.
OWN, FP16 = "ddp", "fp16 hook"

EXAMPLES = f"""\
example:
  scripts/lab door

{LAYERS} parameters of {ENTRIES} entries under SGD with momentum, on one thread. The ratios hold on a busy machine, too."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--specs", type=options.specs, default=SPECS, help=f"separated by semicolons (default: {SPECS})")
    parser.add_argument("--rounds", type=options.positive, default=300, help="that count (default: 300)")
    options.add_places(parser, "the CPU's model")


@threads(1)
def run(chosen: argparse.Namespace) -> int:
    """Take the steps, and write the table."""
    load = [os.getloadavg()[0]]
    lines = measure(chosen.specs, chosen.rounds)
    load.append(os.getloadavg()[0])
    rows = [["", "buckets", *[f"{part}{what}" for part in ("", "backward ") for what in ("ms", "over DDP's own", "at most")]]]
    for line in lines:
        cells = []
        for part in (line, line["backward"]):
            cells += [f"{part['ms']['median']:.2f}"]
            cells += [report.figure(part["over"][which], "{:.2f}") for which in ("median", "at_most")]
        rows.append([line["way"], report.figure(line["buckets"], "{}"), *cells])
    print(report.columns(rows))
    print(f"\nload of the machine before and after: {load[0]:.1f}, {load[1]:.1f}")
    settings = {"layers": LAYERS, "entries": ENTRIES, "bucket_mb": BUCKET_MB, "rounds": chosen.rounds, "load": load}
    report.save(chosen, machine.slug(machine.cpu_name()), {"settings": settings, "lines": lines})
    return 0


def measure(specs: list[str], rounds: int) -> list[dict[str, Any]]:
    """Return a line for each way: milliseconds of backward and step, and of backward, and their ratios to DDP's own.

    Ratios are taken within rounds.
    """
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        ways = {name: Training(name) for name in (OWN, FP16, *specs)}
        cases = [Case(name, way.step, before=way.forward) for name, way in ways.items()]
        timed = clock(torch.device("cpu"))
        interleave(cases, SETTLING, timed)
        seconds = interleave(cases, rounds, timed)
    finally:
        dist.destroy_process_group()
    lines = []
    for name, way in ways.items():
        of_backward, of_own = (each.backward[-rounds:] for each in (way, ways[OWN]))
        lines.append(
            {
                "way": name,
                "buckets": None if way.handle is None else way.handle.stats()["buckets"],
                **compared(seconds[name], seconds[OWN]),
                "backward": compared(of_backward, of_own),
            }
        )
    return lines


def compared(seconds: Sequence[float], of_own: Sequence[float]) -> dict[str, Any]:
    """Return milliseconds, and the ratio to DDP's own."""
    ratios = [each / own for each, own in zip(seconds, of_own, strict=True)]
    at_least, at_most = timing.median_bounds(ratios)
    return {
        "ms": {"median": 1e3 * statistics.median(seconds), "low": 1e3 * min(seconds)},
        "over": {"median": statistics.median(ratios), "at_least": at_least, "at_most": at_most},
    }


class Net(nn.Module):
    """A model of so many layers whose own arithmetic takes hardly any time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.randn(ENTRIES)) for _ in range(LAYERS)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(layer * x).sum() for layer in self.layers]).sum()


class Training:
    """A training under one way. handle: gradcomp's, if the way is a spec. backward: seconds of each backward pass."""

    def __init__(self, way: str):
        capacity = BUCKET_MB * 1e6 / 2**20  # DDP counts in 2^20 bytes
        self._model = DistributedDataParallel(Net(), bucket_cap_mb=capacity, gradient_as_bucket_view=True)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01, momentum=0.9)
        self._input, self._loss = torch.randn(ENTRIES), torch.zeros(())
        self.handle, self.backward = None, list[float]()
        if way == FP16:
            self._model.register_comm_hook(None, fp16_compress_hook)
        elif way != OWN:
            on_updates = gradcomp.make(way).traits.acts_on_updates
            bucket_mb = MODEL_MB / BUCKETS_OF_UPDATES if on_updates else BUCKET_MB
            self.handle = gradcomp.ddp.attach(self._model, way, bucket_mb=bucket_mb)

    def forward(self, i: int) -> None:
        """Make ready for a step."""
        self._optimizer.zero_grad()
        self._loss = self._model(self._input)

    def step(self, i: int) -> None:
        """Take the timed part of a step."""
        began = time.perf_counter()
        self._loss.backward()
        self.backward.append(time.perf_counter() - began)
        self._optimizer.step()
