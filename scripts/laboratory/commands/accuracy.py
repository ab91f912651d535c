"""Train by every way to exchange gradients, time the ways on emulated clusters, and write the page of seconds to accuracy."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from laboratory import options
from laboratory.accuracy import courses, page, plots, summary
from laboratory.accuracy.plan import RANKS, ROUNDS, TURN, Plan
from laboratory.commands.study import prepared_files
from laboratory.machine import ROOT
from laboratory.report import results
from laboratory.study import settings
from laboratory.tasks.table import TASKS
from laboratory.train import kept
from laboratory.train.launch import Launch

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
    """Train and measure what is missing, and write the page."""
    data = prepared_files(chosen.tasks, chosen.data, chosen.cache)
    plan = Plan(chosen.tasks, chosen.hosts, chosen.rate, chosen.seeds, data)
    if not chosen.report:
        if chosen.only != "times":
            courses.complete(plan.courses(), chosen.records, chosen.cache, chosen.projects)
        if chosen.only != "trainings":
            courses.complete(plan.confirmations(), chosen.records, chosen.cache, chosen.projects)
            kept.complete(plan.launches(), times(chosen), work, data=chosen.cache, projects=chosen.projects)
        if chosen.only:
            return 0
    write(plan, chosen)
    return 0


def times(chosen: argparse.Namespace) -> Path:
    """Return the folder of the launches."""
    return Path(chosen.records) / "launches"


def work(launch: Launch) -> float:
    """Estimate the seconds of a launch."""
    return ROUNDS * TURN * len(launch.ways)


def write(plan: Plan, chosen: argparse.Namespace) -> None:
    """Write the page, the pictures and all figures."""
    tasks: dict[str, Any] = {}
    pictures: dict[str, str] = {}
    for task in plan.tasks:
        learning = summary.Learning(plan, task, chosen.records)
        own = plan.settings(task, RANKS)
        whole = [record for course in plan.confirmations() if course.task == task and (record := course.load(chosen.records))]
        tasks[task] = {
            "settings": own._asdict(),
            "seeds": plan.seeds,
            "dense": learning.curves["stock"][-1][1],
            "goal": learning.goal,
            "curves": learning.curves,
            "rates": learning.rates,
            "commits": summary.commits(plan, task, chosen.records),
            "confirmed": summary.confirmation(task, learning, whole[0]) if whole else None,
            "clusters": summary.cells(plan, task, learning, times(chosen)),
        }
        picture = results.path_of(chosen, None, f"-{task}.png")
        plots.draw(task, learning, tasks[task], picture)
        pictures[task] = os.path.relpath(picture, chosen.page.parent)
    path = results.path_of(chosen, None)
    chosen.page.write_text(page.page(tasks, pictures, os.path.relpath(path, chosen.page.parent)))
    print(f"written: {chosen.page}")
    scores = {task: TASKS[task].score_name for task in plan.tasks}
    results.save(chosen, path, {"hosts": plan.hosts, "rates": plan.rates, "scores": scores, "tasks": tasks})
