"""Train real models over many seeds by every way to exchange gradients, and compare each with dense."""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from laboratory import options, report, timing
from laboratory.harness import measured, settings, ways
from laboratory.harness.measured import Lab, Record, Training
from laboratory.machine import ROOT
from laboratory.options import Refused
from laboratory.report import figure
from laboratory.tasks.table import TASKS, files
from laboratory.tasks.task import Settings

# The share of dense's steps after which its training loss is the goal of the others.
GOAL_AT = 0.8

# The parts of a training whose mean losses a record holds. By that of the last one, learning rates are chosen.
PARTS = 10

Line = dict[str, Any]
BySeed = dict[int, Record]
BySpec = dict[str, BySeed]

# The tasks of a study that names none: those without data of their own.
SMALL_TASKS = [name for name, task in TASKS.items() if task.source is None]

EXAMPLES = f"""\
{settings.described()}

examples:
  scripts/lab study --tasks mlp,conv --seeds 10 --specs 'dense;topk:ratio=0.001;topk:ratio=0.01,momentum=0.9' --jobs 2
  scripts/lab study --tasks conv --specs topk:ratio=0.001 --set steps=200,conv.lr=0.1 --name try
  scripts/lab study --tasks cifar --data FOLDER --specs 'topk:ratio=0.01;bf16:steps=4;powersgd:rank=4,start=80' --seeds 2
  scripts/lab study --tasks conv --specs topk --door horovod --name real

Specs are trained with simulated ranks in one process, and so are local steps, as local:EVERY/RATE/MOMENTUM/SPEC, such as
local:30/0.9/0.7/topk; stock, fp16, bf16, powersgd:rank=R and auto by real ranks under DDP, and all but local steps so
with --door. Each finished training is a file in --cache: the
same command continues an interrupted study, and studies share their trainings. Delete the folder after a change of the
measured code. It also holds decoded data."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    tasks = partial(options.listed, read=settings.task)
    parser.add_argument("--tasks", type=tasks, default=SMALL_TASKS, help=f"(default: {','.join(SMALL_TASKS)})")
    named = ", ".join(sorted({task.source.file for task in TASKS.values() if task.source and task.source.file}))
    parser.add_argument("--data", type=Path, metavar="FOLDER", help=f"folder with {named}, for the tasks that need them")
    parser.add_argument("--specs", type=ways.several, required=True, help="compared with dense, which is always among them")
    parser.add_argument("--seeds", type=options.positive, default=5, help="1: without bounds (default: 5)")
    parser.add_argument("--ranks", type=options.positive, default=4, help="(default: 4)")
    whole = "train dense as one rank with the batches of all: their mean gradient is clipped, as under DDP"
    parser.add_argument("--whole", action="store_true", help=whole)
    parser.add_argument("--door", choices=ways.DOORS, help="train all specs on real ranks")
    parser.add_argument("--jobs", type=options.positive, default=1, help="processes of simulated ranks (default: 1)")
    settings.add_changes(parser)
    parser.add_argument("--report", action="store_true", help="train nothing; report what is finished")
    options.add_places(parser, "compare", ROOT / "build" / "study")


def run(chosen: argparse.Namespace) -> int:
    """Train what is missing, and report."""
    settled = settings.settle(chosen.tasks, chosen.set)
    data = files(chosen.tasks, chosen.data, chosen.cache)
    every = [
        training(chosen, task, own, way, seed, data[task])
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
        raise Refused(f"--specs {way}: a study needs ways that exchange gradients and count their bytes")
    if (batches := ways.passes(way)) > own.steps:
        raise Refused(f"--specs {way}: a step needs {batches} batches, and {task} has {own.steps}; give more steps")
    is_local = ways.local_of(way) is not None
    door = chosen.door or (ways.SIMULATED if is_local or ways.is_spec(way) or ways.weight_bits(way) else ways.DDP)
    if is_local and door != ways.SIMULATED:
        raise Refused(f"{way!r} is of simulated ranks; leave --door out")
    if own.clip and not ways.clips(way, door):
        raise Refused(f"{task} clips each rank's gradient, which {way} cannot on real ranks of {door}; add --set clip=0")
    if door != ways.SIMULATED:
        ways.refuse([way], door)
        if chosen.ranks < 2:
            raise Refused(f"--ranks {chosen.ranks}: one real rank exchanges nothing; give at least two")
    if way == "dense" and chosen.whole:
        return Training(task, way, seed, 1, own._replace(batch=own.batch * chosen.ranks), data=data)
    return Training(task, way, seed, chosen.ranks, own, door, data=data)


def write(chosen: argparse.Namespace, every: list[Training], settled: dict[str, Settings]) -> int:
    """Write the tables and the result file of all finished trainings."""
    tasks: dict[str, Any] = {}
    commits: set[str] = set()
    for task, own in settled.items():
        of_task = [each for each in every if each.task == task]
        records: BySpec = {each.way: {} for each in of_task}
        for each in of_task:
            if (record := measured.load(each, chosen.cache)) is not None:
                records[each.way][each.seed] = record
                commits.add(str(record["commit"]))
        least = min(2, chosen.seeds)
        lines = summarize(task, records, least)
        if not lines:
            print(f"lab study: {task}: fewer than {least} seeds of dense are finished; no line yet", file=sys.stderr)
            continue
        parameters = next(iter(records["dense"].values()))["parameters"]
        tasks[task] = {"settings": own._asdict(), "parameters": parameters, "score": TASKS[task].score_name, "lines": lines}
        if data := of_task[0].data:
            tasks[task]["data"] = data
        seeds = "/".join(map(str, sorted({len(line["seeds"]) for line in lines})))
        print(f"\n{task}: {TASKS[task].about}; {seeds} seeds\n\n{markdown(TASKS[task].score_name, lines)}\n")
    if len(commits) > 1:
        print(f"lab study: the trainings are of {len(commits)} commits: {', '.join(sorted(commits))}", file=sys.stderr)
    if not tasks:
        return 1
    content = {name: getattr(chosen, name) for name in ("ranks", "door")}
    content |= {"commits_of_runs": sorted(commits), "tasks": tasks}
    report.save(chosen, "compare", content)
    return 0


def summarize(task: str, records: BySpec, least: int = 2) -> list[Line]:
    """Return a line for every spec, dense first. Only seeds that dense has too count; a line needs two, or as few as these."""
    dense = records["dense"]
    common = {spec: len(by_seed.keys() & dense.keys()) for spec, by_seed in records.items()}
    return [_line(task, spec, by_seed, dense) for spec, by_seed in records.items() if common[spec] >= least]


def _line(task: str, spec: str, by_seed: BySeed, dense: BySeed) -> Line:
    seeds = sorted(by_seed.keys() & dense.keys())
    own, others = [by_seed[seed] for seed in seeds], [dense[seed] for seed in seeds]
    scores, dense_scores = ([record["scores"][-1][2] for record in each] for each in (own, others))
    sign = -1 if TASKS[task].higher_is_better else 1
    worse = [sign * (a - b) for a, b in zip(scores, dense_scores, strict=True)]
    steps, reached = max(1, round(GOAL_AT * len(own[0]["losses"]))), _reached(own, others)
    passes = ways.passes(spec)
    return {
        "spec": spec,
        "seeds": seeds,
        "scores": [or_none(score) for score in scores],
        "score": or_none(statistics.fmean(scores)),
        "score_error": or_none(timing.standard_error(scores)),
        "worse_than_dense": or_none(statistics.fmean(worse)),
        "worse_at_most": or_none(timing.upper_bound(worse)) if spec != "dense" else 0.0,
        "bytes_sent": passes * round(statistics.fmean(sum(record["sent"]) for record in own)),
        "compression": sum(4 * r["parameters"] * len(r["sent"]) for r in own) / max(1, sum(sum(r["sent"]) for r in own)),
        "steps_to_loss": passes * reached if reached is not None else None,  # in batches
        "times_the_steps": reached / steps if reached is not None else None,
        "times_at_most": _times_at_most(own, others, reached, steps) if spec != "dense" else 1.0,
        "losses": _in_parts(_losses(own)),
        "seconds": round(statistics.median(record["seconds"] for record in own), 1),
        "warned_at": [record.get("warned_at") for record in own],  # the step in which simulated ranks warned, by seed
    }


def _in_parts(losses: Sequence[float]) -> list[float | None]:
    """Return the mean loss of each part of a training; fewer parts where it has fewer steps."""
    parts = min(PARTS, len(losses))
    ends = [part * len(losses) // parts for part in range(parts + 1)]
    return [or_none(statistics.fmean(losses[start:end])) for start, end in itertools.pairwise(ends)]


def _losses(records: Sequence[Record]) -> list[float]:
    return [statistics.fmean(values) for values in zip(*(record["losses"] for record in records), strict=True)]


def _reached(own: Sequence[Record], dense: Sequence[Record]) -> int | None:
    """Return the first step, counted from 1, in which the loss is down at dense's; None if it never is."""
    goals = timing.smooth(_losses(dense))
    goal = goals[max(1, round(GOAL_AT * len(goals))) - 1]
    return next((step for step, value in enumerate(timing.smooth(_losses(own)), 1) if value <= goal), None)


def _times_at_most(own: Sequence[Record], dense: Sequence[Record], reached: int | None, steps: int) -> float | None:
    """Bound the multiple of the steps, by the jackknife: what changes when a seed is left out. None if it may be "never"."""
    if len(own) < 2:
        return None
    without = [_reached([*own[:i], *own[i + 1 :]], [*dense[:i], *dense[i + 1 :]]) for i in range(len(own))]
    found = [each for each in without if each is not None]
    if reached is None or len(found) < len(without):
        return None
    return or_none(timing.upper_bound([len(own) * reached - (len(own) - 1) * each for each in found]) / steps)


def or_none(value: float) -> float | None:
    """Round a figure for a result file; None stands for NaN."""
    return round(value, 6) if math.isfinite(value) else None


def markdown(score_name: str, lines: Sequence[Line]) -> str:
    """Write the table of one task."""
    bound = "at most (95 %)"
    heads = ["spec", score_name, "worse than dense", bound, "bytes, dense / sent", "steps to dense's loss", bound]
    with_errors = any(line.get("squared_error") is not None for line in lines)  # older records have some
    with_warnings = any(step is not None for line in lines for step in line.get("warned_at", ()))
    more = ["relative squared error"] * with_errors + ["warned in step"] * with_warnings
    rows = [[*heads, *more]]
    for line in lines:
        dense, bounded = line["spec"] == "dense", line["spec"] != "dense" and len(line["seeds"]) > 1
        cells = [
            f"`{line['spec']}`",
            figure(line["score"], "{:.2f}", "diverged"),
            "" if dense else figure(line["worse_than_dense"], "{:+.3f}", "diverged"),
            figure(line["worse_at_most"], "{:+.3f}", "diverged") if bounded else "",
            f"{line['compression']:,.1f} x",
            figure(line["times_the_steps"], "{:.2f} x", "never"),
            figure(line["times_at_most"], "{:.2f} x", "never") if bounded else "",
        ]
        error = figure(line.get("squared_error"), "{:.3f}", "")
        warned = ", ".join(str(step) for step in line.get("warned_at", ()) if step is not None)
        rows.append([*cells, *[error] * with_errors, *[warned] * with_warnings])
    return report.markdown(rows)
