"""A rank of `lab accuracy`: trains a task from its first step to its last by one way, with the score on the way."""

from __future__ import annotations

from typing import Any

from laboratory import ranks
from laboratory.tasks.training import rate_of
from laboratory.train import start

# The part of the batches before the first score: no training is nearly as good as dense's end by then.
SCORED_FROM = 0.4


def measure(started: start.Started) -> dict[str, Any]:
    """Train by the way on the command line, with as many batches as the settings have steps."""
    options, door, settings = started.options, started.door, started.settings
    trainee = started.trainee(options.way)
    scores: list[tuple[int, float, float]] = []
    seconds, steps = 0.0, 0
    for batch in range(trainee.passes, settings.steps + 1, trainee.passes):
        trainee.fitted.optimizer.param_groups[0]["lr"] = rate_of(started.task, settings, batch)
        seconds += trainee.step()
        steps += 1
        is_last = batch + trainee.passes > settings.steps
        if (batch >= SCORED_FROM * settings.steps and batch % options.every < trainee.passes) or is_last:
            if door.rank == 0:
                scores.append((batch, seconds, started.score_of(trainee)))
                ranks.tell(f"{options.way}: batch {batch} of {settings.steps}, {scores[-1][2]:.2f}", batch / settings.steps)
            door.means([0.0], "scored")
    return {
        "steps": steps,
        "scores": scores,
        "seconds": seconds,
        "parameters": started.parameters,
        "auto": dict(trainee.fitted.stats().get("auto", {})),
    }


def add_options(parser: Any) -> None:
    """Add the options of a whole training."""
    parser.add_argument("--every", type=int, required=True)
    parser.add_argument("way")


if __name__ == "__main__":
    start.run(__doc__, add_options, measure)
