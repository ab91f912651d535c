"""Train a small GPT by plain loops and by the trainers that people run, with each spec, and compare its loss with DDP's."""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path
from typing import Any

from laboratory import machine, options, report
from laboratory.commands.loops import check_spec, judge, known, seeded, train
from laboratory.loops.cell import Key
from laboratory.loops.trainers import TRAINERS
from laboratory.machine import ROOT
from laboratory.tasks import table as tasks
from laboratory.tasks.texts import SHAKESPEARE

SPECS = "topk;sdagc;orq;bingrad;auto;auto:loss=high"

PAGE = ROOT / "docs" / "frameworks.md"

# A loss is near where it is at most so many times that of the trainer without gradcomp.
NEAR = 1.03

KINDS = {"sgd": "SGD", "adamw": "AdamW"}

PACKAGES = ("torch", "transformers", "accelerate", "lightning", "ray")

EXAMPLES = """\
examples:
  scripts/lab trainers --data FOLDER                     # all of them, in an hour
  scripts/lab trainers --data FOLDER --trainers Accelerate --specs topk

FOLDER has tinyshakespeare.txt. The exit status is 1 if a loss is worse than that of the trainer alone by more than 3 % and
nothing refused the training, or if ranks fail. The record keeps the last run of cells that this one does not train."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="folder with tinyshakespeare.txt")
    parser.add_argument(
        "--trainers", type=lambda text: known(text, TRAINERS, ";"), default=[*TRAINERS], help="separated by semicolons"
    )
    parser.add_argument("--specs", type=lambda text: options.specs(text, check_spec), default=SPECS, help=f"(default: {SPECS})")
    parser.add_argument("--steps", type=options.positive, default=200, help="of each training (default: 200)")
    parser.add_argument("--seeds", type=options.positive, default=3, help="trainings of each cell (default: 3)")
    parser.add_argument("--report", action="store_true", help="train nothing: write the record's table into docs/frameworks.md")
    options.add_places(parser, "gpt", ROOT / "build" / "trainers")


def run(chosen: argparse.Namespace) -> int:
    """Train all cells; write the table and the record."""
    if chosen.report:
        PAGE.write_text(written(PAGE.read_text(), report.read(report.path_of(chosen, "gpt"))))
        return 0
    file = tasks.prepare("shakespeare", SHAKESPEARE, chosen.data, chosen.cache)
    text = str(tasks.place(chosen.cache, file).resolve())
    own = [(name, kind) for name in chosen.trainers for kind in TRAINERS[name].kinds]
    alone = [Key(name, TRAINERS[name].doors[0], kind, "", 0, chosen.steps) for name, kind in own]
    every = [*alone, *(key._replace(spec=spec) for key in alone for spec in chosen.specs)]
    lines = judge(train(seeded(every, chosen.seeds), text), is_far)
    path, commit = report.path_of(chosen, "gpt"), machine.commit()
    own_settings = {"steps": chosen.steps, "seeds": chosen.seeds, "commit": commit}
    cells = [{**line, "key": list(line["key"][:4]), **own_settings} for line in lines]
    record = {"packages": machine.versions(PACKAGES), "data": file, "ranks": 2, "cells": joined(path, cells)}
    print(report.columns(table(record)))
    wrong = [line for line in lines if line["verdict"] in ("worse", "warned", "failed")]
    for line in wrong:
        print(f"{line['verdict']}: {', '.join(line['key'][:4])}: {line['score']} against {line['plain']} {line['refused']}")
    report.save(chosen, "gpt", record)
    return int(bool(wrong))


def joined(path: Path, cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add the cells of the last record that this run has not trained, in the order of the table."""
    own = [line["key"] for line in cells]
    others = [line for line in report.read(path)["cells"] if line["key"] not in own] if path.exists() else []
    places = {(name, kind): place for place, (name, kind) in enumerate(product(TRAINERS, KINDS))}
    return sorted([*others, *cells], key=lambda line: places[line["key"][0], line["key"][2]])


def written(page: str, record: dict[str, Any]) -> str:
    """Return the page with the record's table."""
    return report.filled(PAGE, page, "trainers", merged(table(record)))


def merged(rows: list[list[str]]) -> list[list[str]]:
    """Join rows that differ by the trainer, and by what `auto` chose, alone: their names, and the range of such cells."""
    heading, *rest = rows
    varies = [cell.startswith("`auto") for cell in heading]
    groups: dict[tuple[str, ...], list[list[str]]] = {}
    for row in rest:
        kind = row[0].rpartition(", ")[2]
        same = (cell for cell, of_auto in zip(row[1:], varies[1:], strict=True) if not of_auto)
        groups.setdefault((kind, *same), []).append(row)
    return [heading, *(_joined_row(kind, group) for (kind, *_), group in groups.items())]


def _joined_row(kind: str, group: list[list[str]]) -> list[str]:
    names = "; ".join(row[0].removesuffix(f", {kind}") for row in group)
    cells = [[*dict.fromkeys(cells)] for cells in zip(*(row[1:] for row in group), strict=True)]
    return [f"{names}, {kind}", *(each[0] if len(each) == 1 else _range(each) for each in cells)]


def _range(cells: list[str]) -> str:
    ends = sorted(cells, key=lambda cell: float(cell.removesuffix(" %")))
    return f"{ends[0].removesuffix(' %')} to {ends[-1]}"


def is_far(loss: float, plain: float, noise: float) -> bool:
    """Say whether a loss is above plain's by more than the 3 %."""
    return not loss <= NEAR * plain


def table(record: dict[str, Any]) -> list[list[str]]:
    """Write a row for each trainer and optimizer: its loss alone, and by how much each spec's is above it; means over seeds."""
    specs = list(dict.fromkeys(line["key"][3] for line in record["cells"]))
    rows = [["loss of held-out text", "alone", *(f"`{spec}`" for spec in specs)]]
    by_row: dict[tuple[str, str], dict[str, Any]] = {}
    for line in record["cells"]:
        name, _, kind, spec = line["key"][:4]
        by_row.setdefault((name, kind), {})[spec] = line
    for (name, kind), own in by_row.items():
        plain = next((line["plain"] for line in own.values()), None)
        shown = [_shown(own[spec]) if spec in own else "" for spec in specs]
        rows.append([f"{name}, {KINDS[kind]}", report.figure(plain, "{:.3f}"), *shown])
    return rows


def _shown(line: dict[str, Any]) -> str:
    if line["score"] is None:
        return str(line["verdict"])
    mark = {"worse": " WORSE", "warned": " warned"}.get(line["verdict"], "")
    return f"{100 * (line['score'] / line['plain'] - 1):+.1f} %{mark}"
