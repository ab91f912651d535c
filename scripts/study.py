#!/usr/bin/env python3
"""Trains real models with simulated ranks, many seeds for every spec, and says how each spec compares with dense."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from benchlib import machine, report
from studylib import arguments, plots, runs, summary
from studylib.tasks import TASKS, Settings

EXAMPLES = """\
examples:
  scripts/study.py run --tasks mlp,conv,text --seeds 10 --specs 'dense;topk:ratio=0.001;topk:ratio=0.01,momentum=0.9' --jobs 2
  scripts/study.py run --tasks conv --seeds 5 --specs 'topk:ratio=0.001' --set steps=200,conv.lr=0.1 --name try
  scripts/study.py report --name try       # from the runs that are there, also while others are still under way

Every run is kept as a file in --cache: a study that was interrupted continues where it stopped, and runs that studies have in
common are made once. Delete the folder after a change of the code that is measured."""


def run(chosen: argparse.Namespace) -> int:
    plan = {
        "command": chosen.written,
        "tasks": {task: settings._asdict() for task, settings in arguments.settle(chosen.tasks, chosen.set).items()},
        "specs": ["dense", *(spec for spec in chosen.specs if spec != "dense")],
        "seeds": list(range(chosen.seeds)),
        "ranks": chosen.ranks,
    }
    report.write_json(plan_path(chosen), plan)
    runs.complete(all_runs(plan), chosen.cache, chosen.jobs)
    return write(plan, chosen)


def write_report(chosen: argparse.Namespace) -> int:
    path = plan_path(chosen)
    if not path.exists():
        print(
            f"study.py: there is no study {chosen.name!r}; begin one with: study.py run --name {chosen.name}", file=sys.stderr
        )
        return 2
    return write(json.loads(path.read_text()), chosen)


def plan_path(chosen: argparse.Namespace) -> Path:
    return Path(chosen.cache) / "studies" / f"{chosen.name}.json"


def picture(task: str, plan: dict[str, Any], chosen: argparse.Namespace) -> Path:
    """Beside the result file; with the task in its name where there are several."""
    of_task = f"-{task}" if len(plan["tasks"]) > 1 else ""
    return Path(chosen.out) / f"study-{chosen.name}{of_task}.png"


def all_runs(plan: dict[str, Any]) -> list[runs.Run]:
    """Seed by seed, so that every spec has come as far as the others whenever the study is interrupted."""
    return [
        runs.Run(task, spec, seed, plan["ranks"], Settings(**settings))
        for seed in plan["seeds"]
        for task, settings in plan["tasks"].items()
        for spec in plan["specs"]
    ]


def write(plan: dict[str, Any], chosen: argparse.Namespace) -> int:
    """The table, the result file and the pictures, of all runs of the plan that are there."""
    every = all_runs(plan)
    records = {task: runs.records([each for each in every if each.task == task], chosen.cache) for task in plan["tasks"]}
    commits = {str(r["commit"]) for by_spec in records.values() for by_seed in by_spec.values() for r in by_seed.values()}
    tasks: dict[str, Any] = {}
    for task, settings in plan["tasks"].items():
        lines = summary.summarize(task, records[task])
        if not lines:
            print(f"study.py: {task}: fewer than two seeds of dense are done, nothing can be said yet", file=sys.stderr)
            continue
        parameters = next(iter(records[task]["dense"].values()))["parameters"]
        tasks[task] = {"settings": settings, "parameters": parameters, "score": TASKS[task].score_name, "lines": lines}
        print(f"\n{summary.markdown(task, lines)}\n")
        said = f"{parameters:,} parameters, {plan['ranks']} ranks of {settings['batch']}, {settings['steps']} steps"
        print(f"drawn: {plots.draw(task, said, lines, picture(task, plan, chosen))}")
    if len(commits) > 1:
        print(f"study.py: the runs are of {len(commits)} commits: {', '.join(sorted(commits))}", file=sys.stderr)
    if not tasks:
        return 1
    result = {"what": "study", **machine.origin(plan["command"]), "ranks": plan["ranks"]}
    result |= {"commits_of_runs": sorted(commits), "tasks": tasks}
    path = chosen.out / f"study-{chosen.name}.json"
    report.write_json(path, result)
    print(f"written: {path}")
    return 0


def main(given: list[str]) -> int:
    chosen = arguments.parser(__doc__, EXAMPLES, {"run": run, "report": write_report}).parse_args(given)
    chosen.written = shlex.join(["scripts/study.py", *arguments.without_folders(given)])
    try:
        return int(chosen.do(chosen))
    except ValueError as error:
        print(f"study.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        print("\nstudy.py: interrupted; the same command continues after the runs that are done", file=sys.stderr)
        sys.exit(130)
