"""Local steps of two transformers, DDP beside them, on simulated ranks: python -m laboratory.gpu.local_steps --help.

Both ways of a size take as many steps: those of 20 tokens a parameter, or as many as fit into its share of the time.
"""

from __future__ import annotations

import argparse
import os
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from laboratory.gpu import captured
from laboratory.harness.measured import Training
from laboratory.tasks import texts
from laboratory.tasks.table import TASKS
from laboratory.tasks.task import Arrays

# The text, a task of the table. Its tokens are bytes: of Shakespeare there are a million, which a training reads several times.
TEXT = "shakespeare"
SEED = 1
# Exchanges of two short trainings, whose difference tells the seconds of a step.
TRIED = (1, 4)
# Seconds of a training beside its steps: the capture of its graphs, and its score.
BESIDE = 4.0


class Size(NamedTuple):
    """A model, its batches, and its share of the time that is left."""

    width: int
    depth: int
    batch: int
    lr: float
    share: float


class Plan(NamedTuple):
    """What a device trains: simulated ranks, steps from one exchange to the next, tokens a parameter, sizes."""

    ranks: int
    every: int
    tokens: float
    sizes: tuple[Size, ...]

    @property
    def way(self) -> str:
        """LocalSteps with its defaults."""
        return f"local:{self.every}/0.9/0.7/dense"


# On a GPU models of 1.9 and 8.2 million parameters.
PLANS = {
    "cuda": Plan(4, 30, 20.0, (Size(192, 4, 16, 0.002, 0.35), Size(288, 8, 32, 0.001, 1.0))),
    "cpu": Plan(2, 3, 0.05, (Size(32, 1, 2, 0.002, 0.5), Size(64, 1, 2, 0.002, 1.0))),
}


def steps_of(own: Training, arrays: Arrays, plan: Plan, tokens: float, share: float, end: float) -> int:
    """Return the steps of a training, whole periods of local steps: of so many tokens, or those that fit into its time.

    share: of the time that is left until the end, after two short trainings have told the pace.
    """
    tried = [
        captured.train(own._replace(settings=own.settings._replace(steps=plan.every * each)), TASKS[own.task], arrays)
        for each in TRIED
    ]
    pace: float = max((tried[1]["seconds"] - tried[0]["seconds"]) / (tried[1]["steps"] - tried[0]["steps"]), 1e-6)
    wanted = tokens / (own.ranks * own.settings.batch * texts.LENGTH)
    fitting = (share * (end - time.monotonic()) - BESIDE) / pace
    return plan.every * max(1, round(min(wanted, fitting) / plan.every))


def by_ddp(local: Training) -> Training:
    """Return the training of DDP beside local steps: of one rank with the batches of all, whose mean gradient is clipped."""
    whole = local.settings._replace(batch=local.ranks * local.settings.batch)
    return local._replace(way="stock", ranks=1, settings=whole)


def main() -> None:
    """Train both sizes by both ways. Write the record's settings and trainings after each."""
    parser = argparse.ArgumentParser(prog="python -m laboratory.gpu.local_steps", description=__doc__)
    parser.add_argument("--device", choices=PLANS, required=True)
    source = TASKS[TEXT].source
    named = f"{source.file if source else 'a text'}; without it, a file of Python's library"
    parser.add_argument("--data", type=Path, metavar="FILE", help=named)
    parser.add_argument("--seconds", type=float, required=True, help="after which no training is to be under way")
    parser.add_argument("--out", type=Path, required=True, help="the record")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    read = texts.decode((options.data or Path(os.__file__)).read_bytes())
    arrays = {name: array.to(device) for name, array in read.items()}
    plan = PLANS[device.type]
    settings = {
        "text": TEXT if options.data else "a file of Python's library",
        "autocast": "bfloat16",
        "tokens_of_text": len(arrays["train"]),
        "tokens_a_parameter": plan.tokens,
        "seed": SEED,
    }
    found = {"settings": settings, "trainings": []}
    for size in plan.sizes:
        own = TASKS[TEXT].defaults._replace(**{name: getattr(size, name) for name in ("width", "depth", "batch", "lr")})
        with torch.device("meta"):
            parameters = sum(each.numel() for each in texts.Transformer(0, size.width, size.depth).parameters())
        local = Training(TEXT, plan.way, SEED, plan.ranks, own)
        steps = steps_of(local, arrays, plan, plan.tokens * parameters, size.share / 2, end)
        local = local._replace(settings=own._replace(steps=steps))
        every = [
            (
                {"way": each.way, "ranks": each.ranks, "parameters": parameters, **each.settings.key()},
                partial(captured.train, each, TASKS[TEXT], arrays),
            )
            for each in (local, by_ddp(local))  # the second is the faster one
        ]
        captured.in_turn(found, every, "parameters", end, options.out)


if __name__ == "__main__":
    main()
