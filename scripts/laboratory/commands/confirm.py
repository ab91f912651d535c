"""Train one seed of a study over real Horovod processes, and compare the losses and the score with the simulated ranks'."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import gradcomp
from laboratory import machine, options, ranks
from laboratory.commands.study import prepared_files
from laboratory.machine import ROOT
from laboratory.refusal import Refused
from laboratory.report import results
from laboratory.report.tables import columns
from laboratory.study import runs, settings
from laboratory.study.summary import number
from laboratory.tasks.table import TASKS

# The tasks whose simulated compressors know the optimizer, as they do over Horovod.
KNOWN = [name for name, task in TASKS.items() if task.shows_optimizer]

EXAMPLES = f"""\
tasks: {", ".join(KNOWN)}

examples:
  scripts/lab confirm --tasks cifar --data FOLDER --specs topk:ratio=0.01
  scripts/lab confirm --tasks library --specs 'topk;orq' --set steps=50

A simulated run that a study has finished, with the same --cache, is not trained again."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--tasks", type=settings.tasks, required=True)
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="folder with the data of the tasks that need some")
    parser.add_argument("--specs", type=options.specs, required=True, help="specs of gradcomp")
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    parser.add_argument("--ranks", type=options.positive, default=4, help="processes, on this machine (default: 4)")
    parser.add_argument("--set", type=settings.changes, action="append", default=[], metavar="NAME=VALUE,...")
    options.add_places(parser, "none", ROOT / "build" / "study")


def run(chosen: argparse.Namespace) -> int:
    """Train what is missing of the simulated runs, and all real ones. Return 1 if the ranks' weights differ in the end."""
    for task in chosen.tasks:
        if task not in KNOWN:
            raise Refused(f"the study of {task} hides its optimizer, which Horovod shows; --tasks may name {', '.join(KNOWN)}")
    settled = settings.settle(chosen.tasks, chosen.set)
    if "dense" in chosen.specs and any(own.clip for own in settled.values()):
        raise Refused("dense cannot clip each rank's gradient over Horovod as the study does; leave it out, or --set clip=0")
    if any("clip" in str(gradcomp.make(spec)) for spec in chosen.specs) and any(own.clip for own in settled.values()):
        raise Refused("the study clips each rank's gradient already; leave clip out of --specs, or --set clip=0")
    if chosen.ranks < 2:
        raise Refused(f"--ranks {chosen.ranks}: one rank exchanges nothing; give at least two")
    data = prepared_files(chosen.tasks, chosen.data, chosen.cache)
    every = [
        runs.Run(task, spec, chosen.seed, chosen.ranks, own, data.get(task, ""))
        for task, own in settled.items()
        for spec in chosen.specs
    ]
    runs.complete(every, chosen.cache, 1)
    lines = [compared(each, chosen.cache) for each in every]
    print(columns(rows(lines)))
    results.save(chosen, results.path_of(chosen, None), {"ranks": chosen.ranks, "seed": chosen.seed, "lines": lines})
    return 0 if all(line["weights_are_equal"] for line in lines) else 1


def compared(run: runs.Run, cache: Path) -> dict[str, Any]:
    """Train over Horovod, beside the simulated run's record."""
    simulated = run.load(cache)
    assert simulated is not None
    real = ranks.run(command(run, cache), ranks.environment(run.ranks), f"{run.task}  {run.spec}")
    pairs = list(zip(real["losses"], simulated["losses"], strict=True))
    first = next((step for step, (a, b) in enumerate(pairs, 1) if a != number(b) and a == a), None)
    if simulated["commit"] != (now := machine.commit()):
        print(
            f"lab confirm: the simulated run of {run.spec} is of {simulated['commit']}, the real one of {now}", file=sys.stderr
        )
    return {
        "task": run.task,
        "spec": run.spec,
        "spec_over_horovod": real["spec"],
        "score": real["score"],
        "simulated_score": simulated["score"],
        "simulated_at": simulated["commit"],
        "first_other_loss": first,
        "weights_are_equal": real["weights_are_equal"],
        "seconds": real["seconds"],
    }


def command(run: runs.Run, cache: Path) -> list[str]:
    """Write the command of the real ranks."""
    return ranks.command("horovodrun", run.ranks, ["laboratory.study.job", f"--cache={cache}", json.dumps(run.key())])


def rows(lines: list[dict[str, Any]]) -> list[list[str]]:
    """Make the table."""
    found = [["task and spec", "score", "simulated", "losses equal", "weights of all ranks"]]
    for line in lines:
        until = "all" if line["first_other_loss"] is None else f"to step {line['first_other_loss'] - 1}"
        weights = "equal" if line["weights_are_equal"] else "DIFFERENT"
        name = f"{line['task']} ({TASKS[line['task']].score_name})  {line['spec']}"
        found.append([name, f"{line['score']:.2f}", f"{line['simulated_score']:.2f}", until, weights])
    return found
