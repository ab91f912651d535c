"""The start of a rank that trains a task: its options, its door, the model, and this rank's batches."""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from laboratory import ranks
from laboratory.tasks import prepared, training
from laboratory.tasks.table import TASKS
from laboratory.tasks.task import Job, Settings
from laboratory.train import ways
from laboratory.train.trainee import Door, Trainee


class Started:
    """A rank that has started. job: the task for this rank alone."""

    def __init__(self, options: argparse.Namespace, door: Door):
        self.options, self.door = options, door
        self.task = TASKS[options.task]
        self.settings = Settings(**json.loads(options.settings))
        self._arrays = prepared.load(options.data) if options.data else {}
        self.job = self._job()
        self._model: nn.Module = self.job.model
        self.parameters = sum(parameter.numel() for parameter in self._model.parameters())

    def trainee(self, way: str) -> Trainee:
        """Make a way's own model, optimizer and batches."""
        model = copy.deepcopy(self._model)  # a new one takes three times as long
        kept = training.momentum_of(way) if ways.is_spec(way) else 0.0
        optimizer = training.optimizer_of(self.task, self.settings, model, kept)
        fitted = self.door.fit(way, model, optimizer, self.options.seed)
        return Trainee(way, fitted, self._job().batches[self.door.rank], self.job.loss)

    def score_of(self, trainee: Trainee) -> float:
        """Compute the score of a trainee's model, on all cores: the other ranks wait."""
        trained: Any = trainee.fitted.model
        self._model.load_state_dict(getattr(trained, "module", trained).state_dict())
        before = torch.get_num_threads()
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        try:
            return self.job.score()
        finally:
            torch.set_num_threads(before)

    def _job(self) -> Job:
        return self.task.make(self.settings, self.options.seed, self.door.size, self._arrays)


def run(about: str | None, add_options: Callable[[Any], None], measure: Callable[[Started], Mapping[str, Any]]) -> None:
    """Run this process as a rank. All ranks measure, rank 0 reports."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--door", choices=ways.DOORS, required=True)
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--settings", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path)
    add_options(parser)
    options = parser.parse_args()
    door = importlib.import_module(f"laboratory.train.by_{options.door}").Door()
    result = measure(Started(options, door))
    if door.rank == 0:
        ranks.report(result)
    door.end()
    sys.stderr.flush()
    os._exit(0)  # torch's threads and this process end in no fixed order, and now and then abort it after all is done
