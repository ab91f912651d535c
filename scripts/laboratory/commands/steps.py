"""Time the steps of a training on emulated clusters, by every way to exchange gradients, for the tables of step times."""

from __future__ import annotations

import argparse
import itertools
import re
from pathlib import Path

from laboratory import options
from laboratory.harness import measured
from laboratory.harness.measured import Lab, Record, Rounds
from laboratory.harness.ways import DDP, HOROVOD
from laboratory.machine import ROOT
from laboratory.tasks import table as tasks
from laboratory.tasks.table import TASKS

RECORDS = ROOT / "benchmarks" / "results" / "steps"

# The tasks, and the clusters.
TIMED, HOSTS, LINKS = ("cifar-large", "shakespeare"), (4, 8), ("100mbit", "1gbit", "10gbit", "none")

# The ways of gradcomp, and what a user of each door would have in their place. Older records also have `grace` and `dgc`.
OWN = ("topk", "sdagc", "blocks", "auto", "auto:loss=high")
RIVALS = {
    DDP: ("none", "stock", "bf16", "bf16:steps=4", "powersgd:rank=1", "powersgd:rank=4"),
    HOROVOD: ("none", "stock", "fp16"),
}

# A rank's batch is the task's on so many hosts; on more it shrinks, so that the sum stays.
BASE_HOSTS = 4

# A launch: rounds, the steps of a turn, and its seconds.
ROUNDS, STEPS, TURN = 5, 8, 1.2

DOORS = {DDP: "DDP", HOROVOD: "Horovod"}
UNITS = {"kbit": "kbit/s", "mbit": "Mbit/s", "gbit": "Gbit/s"}

EXAMPLES = """\
examples:
  scripts/lab steps --data FOLDER    # two hours of two cores; needs root for the emulated clusters

Each launch is a file in --out: the same command continues where it stopped. Times need the whole machine.
PYTHONPATH=scripts python -m documentation.tables then writes the tables of benchmarks/step-times.md."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER", help="folder with the data of the tasks")
    options.add_places(parser, None, ROOT / "build" / "study", RECORDS)


def run(chosen: argparse.Namespace) -> int:
    """Launch what has no record yet."""
    data = tasks.files(TIMED, chosen.data, chosen.cache)
    every = [own for task in TIMED for own in launches(task, data[task])]
    measured.complete(every, chosen.out, Lab(chosen.command, chosen.cache))
    return 0


def launches(task: str, data: str = "") -> list[Rounds]:
    """List the launches of a task, each of which times all ways of a door on one cluster.

    All ranks together have the same batch, however many they are. Nothing is clipped: the ways would clip different things.
    """
    own = TASKS[task].defaults
    return [
        Rounds(
            "cluster",
            hosts,
            rate,
            task,
            own._replace(clip=0.0, batch=own.batch * BASE_HOSTS // hosts),
            [*rivals, *OWN],
            ROUNDS,
            STEPS,
            TURN,
            door,
            data=data,
        )
        for door, rivals in RIVALS.items()
        for hosts, rate in itertools.product(HOSTS, LINKS)
    ]


def launched(task: str, door: str) -> dict[tuple[int, str], Record]:
    """Read the newest launch of a task and door on each cluster."""
    every = [each for each in measured.records(RECORDS) if (each["key"]["task"], each["key"]["door"]) == (task, door)]
    return {(each["key"]["hosts"], each["key"]["rate"]): each for each in sorted(every, key=lambda each: each.get("date", ""))}


def cluster(hosts: int, rate: str) -> str:
    """Name a cluster."""
    found = re.fullmatch(r"([0-9.]+)([a-z]+)", rate)
    return f"{hosts} hosts, " + (f"{found[1]} {UNITS.get(found[2], found[2])}" if found else "unshaped")
