"""The plan: which ways are trained, on which clusters they are timed, and with which settings."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from laboratory.harness.measured import Rounds, Training
from laboratory.harness.ways import DDP, HOROVOD
from laboratory.tasks.table import TASKS
from laboratory.tasks.task import Settings

# The ways of gradcomp, and the two that choose among them.
OWN = ("topk", "sdagc", "orq:levels=9,momentum=0", "orq:levels=5,momentum=0")
CHOOSING = ("auto", "auto:loss=high")
# The ways that auto may choose beside those.
CHOSEN = ("half",)

# What a user of each door would have in their place.
ADDED_UP = "bf16:steps=4"
RIVALS = {
    DDP: ("stock", "bf16", ADDED_UP, "powersgd:rank=1", "powersgd:rank=4"),
    HOROVOD: ("stock", "fp16", "grace:ratio=0.01", "dgc:ratio=0.01"),
}

# The learning rates that are tried where gradients of several batches are added up, as multiples of the task's.
RATES = (1, 2, 4)

# The ranks of a training, and the batches between two scores.
RANKS, EVERY = 4, 25

# The folders of the records, below that of all.
TRAININGS, LAUNCHES = "courses", "launches"

# A launch: rounds, the steps of a turn, and its seconds.
ROUNDS, STEPS, TURN = 5, 8, 1.2


class Plan(NamedTuple):
    """Everything that decides the trainings and launches. data: the name of each task's prepared file. seeds: of trainings."""

    tasks: list[str]
    hosts: list[int]
    rates: list[str]
    seeds: int
    data: dict[str, str]

    def clusters(self) -> list[tuple[int, str]]:
        """List the clusters: hosts and rate."""
        return list(itertools.product(self.hosts, self.rates))

    def settings(self, task: str, ranks: int, rate: float = 1.0) -> Settings:
        """Return a task's settings. All ranks together have the same batch, however many they are.

        Nothing is clipped: the ways would clip different things.
        """
        own = TASKS[task].defaults
        return own._replace(clip=0.0, batch=own.batch * RANKS // ranks, lr=own.lr * rate)

    def trainings(self) -> list[Training]:
        """List the trainings seed by seed."""
        return [
            own
            for seed in range(self.seeds)
            for task in self.tasks
            for door, way in self.trained()
            for own in self.trainings_of(task, door, way, seed)
        ]

    def trained(self) -> list[tuple[str, str]]:
        """List the ways that are trained, and their doors. A way that both doors have learns alike by both."""
        ours = [(DDP, way) for way in (*RIVALS[DDP], *OWN, *CHOSEN)]
        return ours + [(HOROVOD, way) for way in RIVALS[HOROVOD] if way not in RIVALS[DDP]]

    def trainings_of(self, task: str, door: str, way: str, seed: int) -> list[Training]:
        """List the trainings of a way: one for each learning rate that is tried."""
        return [
            Training(task, way, seed, RANKS, self.settings(task, RANKS, rate), door, EVERY, self.data.get(task, ""))
            for rate in (RATES if way == ADDED_UP else (1,))
        ]

    def launches(self) -> list[Rounds]:
        """List the launches."""
        every = itertools.product(self.tasks, RIVALS, self.clusters())
        return [self.launch(task, door, *cluster) for task, door, cluster in every]

    def launch(self, task: str, door: str, hosts: int, rate: str) -> Rounds:
        """Return the launch that times all ways of a door on one cluster."""
        every = ["none", *RIVALS[door], *OWN, *CHOOSING]
        settings, data = self.settings(task, hosts), self.data.get(task, "")
        return Rounds("cluster", hosts, rate, task, settings, every, ROUNDS, STEPS, TURN, door, data=data)
