"""Many small layers: gradcomp's cost for each does not grow with their number, and stays near the cost of the door alone."""

from __future__ import annotations

import collections
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import doors
import pytest
import ranks
import torch
from doors import ALONE, DDP, DOORS, Training
from torch import Tensor, nn

LAYERS, ENTRIES = 300, 3
SPECS = ("topk", "sdagc", "orq")
# Steps before the first that counts, and those that do.
WARM_UP, ROUNDS = 2, 25
# Lines of Python that a step may run for each layer beside the door's own: up to 100 were measured. A search through all
# layers for each of them would run LAYERS lines or more.
MOST_LINES = 160
# The share of the processor's time that a step may take of the door's own, in its own thread: 1.5 to 1.7 on an idle machine, up
# to 2.0 beside other tests. In C, too, a search through all layers for each of them takes several times the door's own.
MOST_TIME = 2.5

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda of: torch.optim.SGD(of, 1e-3, momentum=0.9, weight_decay=1e-4, nesterov=True),
    "AdamW": lambda of: torch.optim.AdamW(of, 1e-3),
}


class Net(nn.Module):
    """A model of so many layers whose own arithmetic takes hardly any time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.ones(ENTRIES)) for _ in range(LAYERS)])

    def forward(self) -> Tensor:
        return torch.stack(list(self.layers)).square().sum()


def step_of(door: str, optimizer: str, spec: str | None) -> Callable[[], None]:
    model = Net()
    run = Training(door, model, spec, inner=OPTIMIZERS[optimizer](model.parameters()))

    def step() -> None:
        run.optimizer.zero_grad()
        run.whole().backward()
        run.optimizer.step()

    return step


def lines_of(step: Callable[[], None]) -> int:
    """Count the lines of Python that a step runs in its own thread, without those of a wait for other ranks."""
    ran: collections.Counter[str] = collections.Counter()

    def trace(frame: Any, event: str, _: Any) -> Any:
        ran[frame.f_code.co_filename] += event == "line"
        return trace

    sys.settrace(trace)
    step()
    sys.settrace(None)
    return sum(count for file, count in ran.items() if not file.endswith("networks/waits.py"))


def measure(network: str, optimizer: str) -> dict[str, Any]:
    """Run the steps of every way in turns. Return each one's lines, and its seconds of the processor over the door's own.

    The median over the rounds: steps of one round share a load of the machine.
    """
    os.environ["HOROVOD_CACHE_CAPACITY"] = str(2 * LAYERS * (1 + len(SPECS) * len(DOORS)))  # room for all ways at once
    doors.join(network)
    own_doors, alone = ([DDP], DDP) if network == DDP else (DOORS, ALONE)
    steps = {"alone": step_of(alone, optimizer, None)}
    steps |= {f"{spec} by {door}": step_of(door, optimizer, spec) for spec in SPECS for door in own_doors}
    seconds: dict[str, list[float]] = {way: [] for way in steps}
    for at in range(WARM_UP + ROUNDS):
        for way, step in steps.items():
            began = time.thread_time()
            step()
            if at >= WARM_UP:
                seconds[way].append(time.thread_time() - began)
    shares = {way: [own / alone for own, alone in zip(each, seconds["alone"], strict=True)] for way, each in seconds.items()}
    return {way: {"lines": lines_of(step), "share": statistics.median(shares[way])} for way, step in steps.items()}


@pytest.mark.parametrize(("network", "optimizer"), [("ddp", "AdamW"), ("horovod", "SGD")])
def test_a_layer_costs_as_little_among_many_as_among_few(network: str, optimizer: str) -> None:
    for found in ranks.launch(measure, 2, network, optimizer):
        alone = found.pop("alone")
        assert len(found) == len(SPECS) * (1 if network == "ddp" else len(DOORS))
        more = {way: (each["lines"] - alone["lines"]) / LAYERS for way, each in found.items()}
        share = {way: each["share"] for way, each in found.items()}
        assert max(more.values()) <= MOST_LINES, more
        assert max(share.values()) <= MOST_TIME, share
