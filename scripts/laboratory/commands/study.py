"""Train real models over many seeds by every way to exchange gradients, and compare each with dense."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from laboratory import options
from laboratory.harness import measured, settings, ways
from laboratory.harness.measured import Lab, Training
from laboratory.machine import ROOT
from laboratory.refusal import Refused
from laboratory.report import results
from laboratory.study import summary
from laboratory.tasks import prepared
from laboratory.tasks.table import TASKS
from laboratory.tasks.task import Settings

# The tasks of a study that names none: those without data of their own.
SMALL_TASKS = [name for name, task in TASKS.items() if task.source is None]

EXAMPLES = f"""\
{settings.described()}

examples:
  scripts/lab study --tasks mlp,conv --seeds 10 --specs 'dense;topk:ratio=0.001;topk:ratio=0.01,momentum=0.9' --jobs 2
  scripts/lab study --tasks conv --specs topk:ratio=0.001 --set steps=200,conv.lr=0.1 --name try
  scripts/lab study --tasks cifar,library --data FOLDER --specs 'topk:ratio=0.01;bf16;powersgd:rank=1' --seeds 2
  scripts/lab study --tasks library --specs topk --set clip=0 --door horovod --name real

Specs are trained with simulated ranks in one process; stock, fp16, bf16, powersgd:rank=R and auto by real ranks under DDP, and
all of them by real ranks with --door; --rate puts these on emulated hosts. Each finished training is a file in --cache: the
same command continues an interrupted study, and studies share their trainings. Delete the folder after a change of the
measured code. It also holds decoded data."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--tasks", type=settings.tasks, default=SMALL_TASKS, help=f"(default: {','.join(SMALL_TASKS)})")
    files = ", ".join(sorted({task.source.file for task in TASKS.values() if task.source and task.source.file}))
    parser.add_argument("--data", type=Path, metavar="FOLDER", help=f"folder with {files}, for the tasks that need them")
    parser.add_argument("--specs", type=ways.several, required=True, help="compared with dense, which is always among them")
    parser.add_argument("--seeds", type=settings.seeds, default=5, help="two or more (default: 5)")
    parser.add_argument("--ranks", type=options.positive, default=4, help="(default: 4)")
    parser.add_argument("--door", choices=ways.DOORS, help="train all specs on real ranks")
    parser.add_argument("--rate", type=options.rate, help="train them on emulated hosts, with links of this rate")
    parser.add_argument("--jobs", type=options.positive, default=1, help="processes of simulated ranks (default: 1)")
    settings.add_changes(parser)
    parser.add_argument("--report", action="store_true", help="train nothing; report what is finished")
    options.add_places(parser, "compare", ROOT / "build" / "study")


def run(chosen: argparse.Namespace) -> int:
    """Train what is missing, and report."""
    settled = settings.settle(chosen.tasks, chosen.set)
    data = prepared.files(chosen.tasks, chosen.data, chosen.cache)
    every = [
        training(chosen, task, own, way, seed, data.get(task, ""))
        for seed in range(chosen.seeds)  # seed by seed: whenever the study is interrupted, all specs have come equally far
        for task, own in settled.items()
        for way in ["dense", *(spec for spec in chosen.specs if spec != "dense")]
    ]
    if not chosen.report:
        measured.complete(every, chosen.cache, Lab(chosen.command, chosen.cache, jobs=chosen.jobs))
    return write(chosen, every, settled)


def training(chosen: argparse.Namespace, task: str, own: Settings, way: str, seed: int, data: str) -> Training:
    """Return the training of one way and seed; refuse one that cannot be compared."""
    if not ways.is_studied(way):
        raise Refused(f"--specs {way}: a study needs ways that exchange gradients in each step and count their bytes")
    if chosen.rate and not chosen.door:
        raise Refused("--rate is of real ranks; add --door ddp or --door horovod")
    door = chosen.door or (ways.SIMULATED if ways.is_spec(way) else ways.DDP)
    if own.clip and not ways.clips(way, door):
        raise Refused(f"{task} clips each rank's gradient, which {way} cannot on real ranks of {door}; add --set clip=0")
    if door != ways.SIMULATED:
        ways.refuse([way], door)
        if chosen.ranks < 2:
            raise Refused(f"--ranks {chosen.ranks}: one real rank exchanges nothing; give at least two")
    return Training(task, way, seed, chosen.ranks, own, door, data=data, rate=chosen.rate or "")


def write(chosen: argparse.Namespace, every: list[Training], settled: dict[str, Settings]) -> int:
    """Write the tables, pictures and result file of all finished trainings."""
    tasks: dict[str, Any] = {}
    commits: set[str] = set()
    for task, own in settled.items():
        records: summary.BySpec = {}
        for each in every:
            found = records.setdefault(each.way, {}) if each.task == task else {}
            if each.task == task and (record := measured.load(each, chosen.cache)) is not None:
                found[each.seed] = record
                commits.add(str(record["commit"]))
        lines = summary.summarize(task, records)
        if not lines:
            print(f"lab study: {task}: fewer than two seeds of dense are finished; no line yet", file=sys.stderr)
            continue
        parameters = next(iter(records["dense"].values()))["parameters"]
        tasks[task] = {"settings": own._asdict(), "parameters": parameters, "score": TASKS[task].score_name, "lines": lines}
        if data := next(each.data for each in every if each.task == task):
            tasks[task]["data"] = data
        print(f"\n{summary.markdown(task, lines)}\n")
        trained = f"{parameters:,} parameters, {chosen.ranks} ranks of {own.batch}, {own.steps} steps"
        of_task = f"-{task}" if len(settled) > 1 else ""
        summary.draw(task, trained, lines, results.path_of(chosen, "compare", f"{of_task}.png"))
    if len(commits) > 1:
        print(f"lab study: the trainings are of {len(commits)} commits: {', '.join(sorted(commits))}", file=sys.stderr)
    if not tasks:
        return 1
    content = {
        "ranks": chosen.ranks,
        "door": chosen.door,
        "rate": chosen.rate,
        "commits_of_runs": sorted(commits),
        "tasks": tasks,
    }
    results.save(chosen, results.path_of(chosen, "compare"), content)
    return 0
