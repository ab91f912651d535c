"""Train a small GPT by plain loops and by the trainers that people run, with each spec, and compare its loss with DDP's."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from laboratory import machine, options, report
from laboratory.commands import loops
from laboratory.loops.cell import Key
from laboratory.loops.trainers import TRAINERS
from laboratory.machine import ROOT
from laboratory.tasks import table as tasks
from laboratory.tasks.texts import SHAKESPEARE

SPECS = "topk;sdagc;orq;bingrad;auto;auto:loss=high"

# A loss is near where it is at most so many times that of the trainer without gradcomp.
NEAR = 1.03

KINDS = {"sgd": "SGD", "adamw": "AdamW"}

PACKAGES = ("torch", "transformers", "accelerate", "lightning", "ray")

EXAMPLES = """\
examples:
  scripts/lab trainers --data FOLDER                     # all of them, in an hour
  scripts/lab trainers --data FOLDER --trainers Accelerate --specs topk

FOLDER has tinyshakespeare.txt. The exit status is 1 if a loss is worse than that of the trainer alone by more than 3 % and
nothing refused the training, or if ranks fail."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="folder with tinyshakespeare.txt")
    trainers = options.some_of(TRAINERS, ";")
    parser.add_argument("--trainers", type=trainers, default=[*TRAINERS], help="separated by semicolons (default: all)")
    loops.add_trainings(parser, SPECS, 200)
    options.add_places(parser, "gpt", ROOT / "build" / "trainers")


def run(chosen: argparse.Namespace) -> int:
    """Train all cells; write the table and the record."""
    file = tasks.prepare("shakespeare", SHAKESPEARE, chosen.data, chosen.cache)
    text = str(tasks.place(chosen.cache, file).resolve())
    alone = [Key(name, TRAINERS[name].doors[0], kind, "", 0, chosen.steps) for name in chosen.trainers for kind in KINDS]
    every = [*alone, *(key._replace(spec=spec) for key in alone for spec in chosen.specs)]
    lines = loops.judge(loops.train(loops.seeded(every, chosen.seeds), text), is_far)
    own = {"steps": chosen.steps, "seeds": chosen.seeds, "commit": machine.commit()}
    cells = [{**line, "key": list(line["key"][:4]), **own} for line in lines]
    record = {"packages": machine.versions(PACKAGES), "data": file, "ranks": 2, "cells": cells}
    print(report.columns(table(cells)))
    report.save(chosen, "gpt", record)
    return loops.complain(lines, "worse", "warned", "failed")


def is_far(loss: float, plain: float, noise: float) -> bool:
    """Say whether a loss is above plain's by more than the 3 %."""
    return not loss <= NEAR * plain


def table(cells: Sequence[Any]) -> list[list[str]]:
    """Write a row for each trainer and optimizer: its loss alone, and by how much each spec's is above it; means over seeds."""
    heading, *rows = loops.table(cells, ("loss of held-out text", "alone"), "{:.3f}", above)
    named = [name.rpartition(", ")[0].rpartition(", ")[0] for name, *_ in rows]
    kinds = [KINDS[name.rpartition(", ")[2]] for name, *_ in rows]
    heading = [*heading[:2], *(f"`{spec}`" for spec in heading[2:])]
    return [heading, *([f"{name}, {kind}", *cells] for name, kind, (_, *cells) in zip(named, kinds, rows, strict=True))]


def above(line: dict[str, Any]) -> str:
    """Write by how much a loss is above that of the trainer alone."""
    if line["score"] is None:
        return str(line["verdict"])
    mark = {"worse": " WORSE", "warned": " warned"}.get(line["verdict"], "")
    return f"{100 * (line['score'] / line['plain'] - 1):+.1f} %{mark}"
