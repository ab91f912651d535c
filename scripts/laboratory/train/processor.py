"""The processor time of a step: of the threads that train, of those of the network, and of a compressor's kernels alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from gradcomp.engine.optimizers.own_momentum import OwnMomentum
from gradcomp.prediction import trial
from laboratory.host import costs
from laboratory.tasks import training
from laboratory.train import ways
from laboratory.train.start import Started

# Bytes that are written to leave nothing else in the caches: more than any of them holds.
SWEPT = 128_000_000


class Used(NamedTuple):
    """Seconds of processor time since this process began. network: of all threads that neither train nor run backward."""

    own: float
    network: float

    def since(self, before: Used) -> Used:
        """Return what was used since then."""
        return Used(self.own - before.own, self.network - before.network)


def used() -> Used:
    """Read the times of this process's threads. A thread that ended is in none of them."""
    found = {True: 0.0, False: 0.0}
    for thread in Path("/proc/self/task").iterdir():
        try:
            name, times = (thread / "comm").read_text(), (thread / "schedstat").read_text()
        except OSError:
            continue  # it has just ended
        trains = int(thread.name) == os.getpid() or name.startswith("pt_autograd")
        found[trains] += int(times.split()[0]) / 1e9
    return Used(found[True], found[False])


class Kernels(NamedTuple):
    """Seconds that a step computes alone. warm: where it finds its arrays in the caches, if these hold them.

    cold: where it finds nothing there, as after forward and backward.
    """

    warm: float
    cold: float


def kernels(started: Started, way: str) -> Kernels | None:
    """Time what a step of a spec computes on this rank alone, while the others wait. None for other ways.

    A spec that takes the optimizer's momentum over does so here, too.
    """
    if not ways.is_spec(way):
        return None
    door, mine = started.door, [0.0, 0.0]
    swept = torch.zeros(SWEPT // 4)
    for rank in range(door.size):
        if rank == door.rank:
            mine = [_alone(started, way, between) for between in (lambda: None, lambda: swept.add_(1))]
        door.means([0.0], f"alone {way} {rank}")
    return Kernels(*door.means(mine, f"kernels {way}"))


def _alone(started: Started, way: str, between: Callable[[], object]) -> float:
    parameters = dict(started.job.model.named_parameters())
    shapes = {name: tuple(each.shape) for name, each in parameters.items()}
    optimizer = training.optimizer_of(started.task, started.settings, started.job.model, training.momentum_of(way))
    # Unless all ranks know the optimizer, they do not compare their noise, which would be no work of this rank alone.
    momentum = OwnMomentum(
        lambda: optimizer,
        parameters,
        lambda name, tensor: tensor.reshape(-1),
        applies=lambda: False,
        is_told=lambda: False,
    )
    world, cpu = started.door.network().world, torch.device("cpu")
    buckets = trial.try_out(way, shapes, world, costs.BUCKET_MB, cpu, momentum=momentum, between=between)
    return sum(part.seconds for bucket in buckets for part in bucket.parts)
