"""Train by every way to exchange gradients, time the ways on emulated clusters, and write the page of seconds to accuracy."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from laboratory import options
from laboratory.accuracy import page, summary
from laboratory.accuracy.plan import LAUNCHES, TRAININGS, Plan
from laboratory.harness import measured, settings
from laboratory.harness.measured import Lab
from laboratory.machine import ROOT
from laboratory.report import results
from laboratory.tasks import prepared
from laboratory.tasks.table import TASKS

PAGE = ROOT / "docs" / "time-to-accuracy.md"
RECORDS = ROOT / "benchmarks" / "results" / "accuracy"

EXAMPLES = """\
examples:
  scripts/lab accuracy --data FOLDER --projects FOLDER    # five hours of two cores; needs root for the emulated clusters
  scripts/lab accuracy --data FOLDER --projects FOLDER --report    # from what is finished, also while the rest is under way

FOLDER of --projects holds checkouts of github.com/sands-lab/grace and github.com/synxlin/deep-gradient-compression, named grace
and dgc. Each training and each launch is a file in --records: the same command continues where it stopped. Times need the whole
machine; --only does one of both parts."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER", help="folder with the data of the tasks")
    parser.add_argument("--projects", type=Path, metavar="FOLDER", help="folder with checkouts `grace` and `dgc`")
    parser.add_argument("--tasks", type=settings.tasks, default="cifar-large,shakespeare", help="(default: both)")
    parser.add_argument("--hosts", type=options.hosts, default="4,8", help="sizes of the clusters (default: 4,8)")
    parser.add_argument(
        "--rate", type=options.rates, default="100mbit,1gbit,10gbit,none", help="(default: 100mbit,1gbit,10gbit,none)"
    )
    parser.add_argument("--seeds", type=options.positive, default=1, help="of the trainings (default: 1)")
    parser.add_argument("--only", choices=("trainings", "times"), help="make only these, and no page")
    parser.add_argument("--report", action="store_true", help="make the page of what is finished")
    parser.add_argument("--page", type=Path, default=PAGE, help="(default: docs/time-to-accuracy.md)")
    parser.add_argument(
        "--records", type=Path, default=RECORDS, metavar="FOLDER", help="finished parts (default: benchmarks/results/accuracy)"
    )
    options.add_places(parser, "the page", ROOT / "build" / "study")


def run(chosen: argparse.Namespace) -> int:
    """Train and measure what is missing, and write the page and all figures."""
    data = prepared.files(chosen.tasks, chosen.data, chosen.cache)
    plan = Plan(chosen.tasks, chosen.hosts, chosen.rate, chosen.seeds, data)
    lab = Lab(chosen.command, chosen.cache, chosen.projects)
    if not chosen.report:
        if chosen.only != "times":
            measured.complete(plan.trainings(), chosen.records / TRAININGS, lab)
        if chosen.only != "trainings":
            measured.complete(plan.launches(), chosen.records / LAUNCHES, lab)
        if chosen.only:
            return 0
    tasks = {task: summary.figures(plan, task, chosen.records) for task in plan.tasks}
    path = results.path_of(chosen, None)
    chosen.page.write_text(page.page(tasks, os.path.relpath(path, chosen.page.parent)))
    print(f"written: {chosen.page}")
    scores = {task: TASKS[task].score_name for task in plan.tasks}
    results.save(chosen, path, {"hosts": plan.hosts, "rates": plan.rates, "scores": scores, "tasks": tasks})
    return 0
