"""A rank of `lab layers`: steps of a model of many tiny layers, by a door alone and with gradcomp, in turns."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import gradcomp
from laboratory import ranks
from laboratory.timing import rotated

WARM_UP = 3

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda of: torch.optim.SGD(of, 1e-3, momentum=0.9, weight_decay=1e-4),
    "adamw": lambda of: torch.optim.AdamW(of, 1e-3),
}
Steps = dict[str, Callable[[], None]]


class Net(nn.Module):
    """A model whose own arithmetic takes hardly any time."""

    def __init__(self, layers: int, entries: int):
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.ones(entries)) for _ in range(layers)])

    def forward(self) -> Tensor:
        """Use every layer."""
        return torch.stack(list(self.layers)).square().sum()


def step_of(model: nn.Module, optimizer: Any) -> Callable[[], None]:
    """Make a function that trains one step."""

    def step() -> None:
        optimizer.zero_grad()
        model().backward()
        optimizer.step()

    return step


def by_ddp(make: Callable[[], nn.Module], optimizer: str, specs: list[str]) -> Steps:
    """Make a step for DDP alone, and for each spec."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    found = {}
    for spec in ("", *specs):
        plain = make()
        model, own = DistributedDataParallel(plain), OPTIMIZERS[optimizer](plain.parameters())
        if spec:
            gradcomp.ddp.attach(model, spec, optimizer=own)
        found[spec] = step_of(model, own)
    return found


def by_horovod(make: Callable[[], nn.Module], optimizer: str, specs: list[str], carriers: bool) -> Steps:
    """Make a step for Horovod alone, and for each spec, by Compression (with carriers) or DistributedOptimizer."""
    import horovod.torch as hvd

    hvd.init()
    found = {}
    for spec in ("", *specs):
        model = make()
        named = [(f"{spec}.{name}", parameter) for name, parameter in model.named_parameters()]
        own: Any = OPTIMIZERS[optimizer](model.parameters())
        if not spec or carriers:
            more = {"compression": gradcomp.horovod.Compression(spec, named, optimizer=own)} if spec else {}
            own = hvd.DistributedOptimizer(own, named, **more)
        else:
            own = gradcomp.horovod.DistributedOptimizer(own, named, spec)
        found[spec] = step_of(model, own)
    return found


def timed(steps: Steps, rounds: int, count: int, tell: bool) -> dict[str, list[dict[str, float]]]:
    """Return for each spec and round the seconds of a step, by the clock and of this process's processors."""
    names = list(steps)
    found: dict[str, list[dict[str, float]]] = {spec: [] for spec in steps}
    for step in steps.values():
        for _ in range(WARM_UP):
            step()
    for at in range(rounds):
        if tell:
            ranks.tell(f"round {at + 1} of {rounds}", at / rounds)
        for i in rotated(len(names), at):
            began, used = time.perf_counter(), time.process_time()
            for _ in range(count):
                steps[names[i]]()
            seconds = {"wall": time.perf_counter() - began, "processor": time.process_time() - used}
            found[names[i]].append({key: value / count for key, value in seconds.items()})
    return found


def main() -> None:
    """Time the door on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("layers", "entries", "rounds", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--door", required=True)
    parser.add_argument("--optimizer", required=True)
    parser.add_argument("specs", nargs="+")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", os.environ.get("HOROVOD_RANK", "0")))

    def make() -> nn.Module:
        return Net(chosen.layers, chosen.entries)

    if chosen.door == "ddp":
        steps = by_ddp(make, chosen.optimizer, chosen.specs)
        found = timed(steps, chosen.rounds, chosen.steps, rank == 0)
        if rank == 0:
            ranks.report(found)
        return
    steps = by_horovod(make, chosen.optimizer, chosen.specs, carriers=chosen.door == "compression")
    ranks.horovod_job(lambda: timed(steps, chosen.rounds, chosen.steps, rank == 0))


if __name__ == "__main__":
    main()
