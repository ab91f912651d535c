"""Trains many models side by side, a step of each in turn, and reports every model's weights.

All gradients of a step are on their way before the first optimizer waits: many optimizers at once, and fast.
"""

import contextlib
import os
import warnings
from typing import Any

import horovod.torch as hvd
import ranks
import training

os.environ["HOROVOD_CYCLE_TIME"] = "5"  # ms: much is under way at once, and frequent looking eats the two cores
hvd.init()
asked = ranks.arguments()
OPTIONS: dict[str, dict[str, Any]] = {
    "average": {},
    "sum": {"op": hvd.Sum},
    "predivide": {"gradient_predivide_factor": 2.0},
    "num_groups": {"num_groups": 1},
    "groups": {"groups": 1},
    "accumulate": {"backward_passes_per_step": 2},
    "dynamic": {},
    "dynamic accumulate": {"backward_passes_per_step": 2},
    "dynamic groups": {"groups": 1},
}


class Run:
    """One model in training."""

    def __init__(self, setting: str, route: str, spec: str, bucket_mb: float):
        self.dynamic = "dynamic" in setting
        self.passes = 2 if "accumulate" in setting else 1
        self.model = training.net(unused=self.dynamic)
        options = OPTIONS[setting]
        deprecated = "num_groups" in options and route != training.OWN
        prefix = f"{setting}/{route}/{spec}/{bucket_mb}."
        with warnings.catch_warnings(record=True) if deprecated else contextlib.nullcontext():
            warnings.simplefilter("always" if deprecated else "error")
            self.optimizer = training.sgd(route, self.model, spec, prefix=prefix, bucket_mb=bucket_mb, **options)
        self.data = training.batches()

    def backward(self, step: int) -> None:
        self.optimizer.zero_grad()
        for turn in range(self.passes):
            skip = self.dynamic and (step + turn + hvd.rank()) % 3 == 0
            training.backward(self.model, next(self.data), skip=skip)


runs = {tuple(run): Run(*run) for run in asked["runs"]}
for step in range(asked["steps"]):
    for run in runs.values():
        run.backward(step)
    for run in runs.values():
        run.optimizer.step()
ranks.report(
    {
        key: {
            "weights": training.weights(run.model),
            "stats": run.optimizer.compression.stats() if key[1] in training.ROUTES else None,
        }
        for key, run in runs.items()
    }
)
hvd.barrier()
