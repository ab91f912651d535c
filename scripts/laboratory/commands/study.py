"""Train real models with simulated ranks, with many seeds for every spec, and compare each spec with dense."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from laboratory import options
from laboratory.machine import ROOT
from laboratory.refusal import Refused
from laboratory.report import results
from laboratory.study import peers, plots, runs, settings, summary
from laboratory.tasks import prepared
from laboratory.tasks.table import TASKS
from laboratory.tasks.task import Settings

# The tasks of a study that names none: those without data of their own.
SMALL_TASKS = [name for name, task in TASKS.items() if task.source is None]

EXAMPLES = f"""\
{settings.described()}

examples:
  scripts/lab study --tasks mlp,conv,text --seeds 10 --specs 'dense;topk:ratio=0.001;topk:ratio=0.01,momentum=0.9' --jobs 2
  scripts/lab study --tasks conv --specs topk:ratio=0.001 --set steps=200,conv.lr=0.1 --name try
  scripts/lab study --tasks cifar,library --data FOLDER --specs 'topk:ratio=0.01;bf16;powersgd:rank=4' --seeds 2
  scripts/lab study --report --name try     # from the finished runs, also while others are under way

Beside gradcomp's specs there are two peers: bf16 rounds gradients to bfloat16; powersgd:rank=R is PowerSGD with factors of this
rank. Each finished run is a file in --cache: the same command continues an interrupted study, and studies share their runs.
Delete the folder after a change of the measured code. It also holds decoded data."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--tasks", type=settings.tasks, default=SMALL_TASKS, help=f"(default: {','.join(SMALL_TASKS)})")
    files = ", ".join(sorted({task.source.file for task in TASKS.values() if task.source and task.source.file}))
    parser.add_argument("--data", type=Path, metavar="FOLDER", help=f"folder with {files}, for the tasks that need them")
    parser.add_argument("--specs", type=peers.specs, help="compared with dense, which is always among them")
    parser.add_argument("--seeds", type=settings.seeds, default=5, help="two or more (default: 5)")
    parser.add_argument("--ranks", type=options.positive, default=4, help="simulated ranks (default: 4)")
    parser.add_argument("--jobs", type=options.positive, default=1, help="processes of one thread each (default: 1)")
    parser.add_argument(
        "--set",
        type=settings.changes,
        action="append",
        default=[],
        metavar="NAME=VALUE,...",
        help="change a setting of all tasks (lr=0.1), or of one (conv.lr=0.1); the settings are listed below",
    )
    parser.add_argument("--report", action="store_true", help="train nothing; report the finished runs of --name")
    options.add_places(parser, "compare", ROOT / "build" / "study")


def run(chosen: argparse.Namespace) -> int:
    """Train what is missing, and report."""
    plan_path = Path(chosen.cache) / "studies" / f"{chosen.name or 'compare'}.json"
    if chosen.report:
        kept = results.read(plan_path)
        if kept is None:
            raise Refused(f"no study is named {plan_path.stem!r} in --cache; begin one without --report")
        return write(kept, chosen)
    if chosen.specs is None:
        raise Refused("--specs is missing; write for example --specs 'topk:ratio=0.001;gtopk'")
    settled = settings.settle(chosen.tasks, chosen.set)
    plan = {
        "command": chosen.command,
        "tasks": {task: own._asdict() for task, own in settled.items()},
        "data": prepared_files(chosen.tasks, chosen.data, chosen.cache),
        "specs": ["dense", *(spec for spec in chosen.specs if spec != "dense")],
        "seeds": list(range(chosen.seeds)),
        "ranks": chosen.ranks,
    }
    results.write(plan_path, plan)
    runs.complete(all_runs(plan), chosen.cache, chosen.jobs)
    return write(plan, chosen)


def prepared_files(tasks: Sequence[str], data: Path | None, cache: Path) -> dict[str, str]:
    """Prepare the data of the tasks that have some, and name the files."""
    sources = {task: TASKS[task].source for task in tasks}
    return {task: prepared.prepare(task, source, data, cache) for task, source in sources.items() if source is not None}


def all_runs(plan: dict[str, Any]) -> list[runs.Run]:
    """List the runs seed by seed: whenever the study is interrupted, all specs have come equally far."""
    return [
        runs.Run(task, spec, seed, plan["ranks"], Settings(**own), plan.get("data", {}).get(task, ""))
        for seed in plan["seeds"]
        for task, own in plan["tasks"].items()
        for spec in plan["specs"]
    ]


def write(plan: dict[str, Any], chosen: argparse.Namespace) -> int:
    """Write the tables, pictures and result file of all finished runs."""
    every, commits = all_runs(plan), set()
    tasks: dict[str, Any] = {}
    for task, own in plan["tasks"].items():
        records = runs.records([each for each in every if each.task == task], chosen.cache)
        commits |= runs.commits_of(records)
        lines = summary.summarize(task, records)
        if not lines:
            print(f"lab study: {task}: fewer than two seeds of dense are finished; no line yet", file=sys.stderr)
            continue
        parameters = next(iter(records["dense"].values()))["parameters"]
        tasks[task] = {"settings": own, "parameters": parameters, "score": TASKS[task].score_name, "lines": lines}
        if data := plan.get("data", {}).get(task):
            tasks[task]["data"] = data
        print(f"\n{summary.markdown(task, lines)}\n")
        trained = f"{parameters:,} parameters, {plan['ranks']} ranks of {own['batch']}, {own['steps']} steps"
        of_task = f"-{task}" if len(plan["tasks"]) > 1 else ""
        plots.draw(task, trained, lines, results.path_of(chosen, "compare", f"{of_task}.png"))
    if len(commits) > 1:
        print(f"lab study: the runs are of {len(commits)} commits: {', '.join(sorted(commits))}", file=sys.stderr)
    if not tasks:
        return 1
    content = {"ranks": plan["ranks"], "commits_of_runs": sorted(commits), "tasks": tasks}
    results.save(chosen, results.path_of(chosen, "compare"), content, plan["command"])
    return 0
