"""A rank of `lab confirm`: trains one run of a study over Horovod, through gradcomp.horovod.DistributedOptimizer."""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

import gradcomp
import gradcomp.horovod
from laboratory import ranks
from laboratory.study.runs import Run
from laboratory.tasks import training
from laboratory.tasks.table import TASKS
from laboratory.tasks.task import Settings

# Steps between two lines of progress.
OFTEN = 10


def bounded(spec: str, clip: float, world: int) -> str:
    """Add the knob that does to a rank's gradient what a study's clip does. The knob divides by the root of the ranks."""
    if not clip:
        return spec
    knob = f"clip={clip * math.sqrt(world)!r},clip_by=model"
    return f"{spec}{',' if ':' in spec else ':'}{knob}"


def train(run: Run, folder: Path) -> dict[str, Any]:
    """Train this rank's part. Return the mean loss of every step, and rank 0's score."""
    began, task, settings = time.perf_counter(), TASKS[run.task], run.settings
    job = run.make_job(folder)
    batches = job.batches[hvd.rank()]
    spec = bounded(run.spec, settings.clip, hvd.size())
    plain = training.optimizer_of(task, settings, job.model, training.momentum_of(run.spec))
    optimizer = gradcomp.horovod.DistributedOptimizer(
        plain, job.model.named_parameters(), compression=gradcomp.make(spec), seed=run.seed
    )
    losses: list[float] = []
    for step in range(1, settings.steps + 1):
        optimizer.param_groups[0]["lr"] = training.rate_of(task, settings, step)
        x, y = next(batches)
        loss = job.loss(job.model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if hvd.rank() == 0 and step % OFTEN == 0:
            ranks.tell(f"step {step} of {settings.steps}", step / settings.steps)
    mean = hvd.allreduce(torch.tensor(losses, dtype=torch.float64), op=hvd.Average, name="losses")
    weights = hvd.allgather(torch.cat([p.detach().flatten() for p in job.model.parameters()])[None], name="weights")
    return {
        "losses": [round(float(loss), 6) for loss in mean],
        "weights_are_equal": bool((weights == weights[0]).all()),
        "score": job.score(),
        "spec": spec,
        "seconds": round(time.perf_counter() - began, 2),
    }


def measure() -> dict[str, Any]:
    """Train the run on the command line, which is the key of its record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("run", type=json.loads)
    options = parser.parse_args()
    torch.set_num_threads(1)
    return train(Run(**{**options.run, "settings": Settings(**options.run["settings"])}), options.cache)


if __name__ == "__main__":
    ranks.horovod_job(measure)
