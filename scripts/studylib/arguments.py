"""What study.py is told, checked before anything is trained: tasks, specs, seeds, settings."""

from __future__ import annotations

import argparse
import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchlib import machine
from benchlib.options import positive

import gradcomp
from studylib.tasks import TASKS, WHOLE, Settings

Change = tuple[str | None, str, float]
"""A task, or None for all of them, one of its settings, and the new value."""


def tasks(text: str) -> list[str]:
    found = [part.strip() for part in text.split(",") if part.strip()]
    for name in found:
        if name not in TASKS:
            raise argparse.ArgumentTypeError(f"there is no task {name!r}{_suggest(name, TASKS)}; known: {', '.join(TASKS)}")
        if found.count(name) > 1:
            raise argparse.ArgumentTypeError(f"{name!r} is given twice")
    if not found:
        raise argparse.ArgumentTypeError(f"no task is given; known: {', '.join(TASKS)}")
    return found


def specs(text: str) -> list[str]:
    """Separated by semicolons, since a spec has commas of its own."""
    found = [part.strip() for part in text.split(";") if part.strip()]
    for spec in found:
        if found.count(spec) > 1:
            raise argparse.ArgumentTypeError(f"{spec!r} is given twice")
        try:
            gradcomp.make(spec)
        except ValueError as error:
            hint = "" if ";" in text else "; specs are separated by semicolons"
            raise argparse.ArgumentTypeError(f"{error}{hint}") from None
    if not found:
        raise argparse.ArgumentTypeError("no spec is given")
    return found


def seeds(text: str) -> int:
    count = positive(text)
    if count < 2:
        raise argparse.ArgumentTypeError("a bound needs at least two seeds, for it comes from how much they differ")
    return count


def changes(text: str) -> list[Change]:
    """steps=200,mlp.lr=0.05."""
    found: list[Change] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        left, equals, right = part.partition("=")
        task, dot, name = left.strip().rpartition(".")
        if dot and task not in TASKS:
            raise argparse.ArgumentTypeError(f"there is no task {task!r}{_suggest(task, TASKS)}; known: {', '.join(TASKS)}")
        if name not in Settings._fields:
            known = f"{_suggest(name, Settings._fields)}; known: {', '.join(Settings._fields)}"
            raise argparse.ArgumentTypeError(f"there is no setting {name!r}{known}")
        found.append((task or None, name, _value(name, right.strip() if equals else "")))
    return found


def _value(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    whole = name in WHOLE
    lowest_fits = value >= 1 if whole else value >= 0 if name in ("momentum", "clip") else value > 0
    if not math.isfinite(value) or not lowest_fits or (whole and value != int(value)) or (name == "momentum" and value >= 1):
        kind = "a whole number above 0" if whole else "a number in [0, 1)" if name == "momentum" else "a number that fits"
        raise argparse.ArgumentTypeError(f"{name}={text!r} is not {kind}")
    return int(value) if whole else value


def settle(chosen: Sequence[str], changed: Sequence[Sequence[Change]]) -> dict[str, Settings]:
    """The settings of every chosen task; what is said of one task stands above what is said of all."""
    every = sorted((change for some in changed for change in some), key=lambda change: change[0] is not None)
    for task, name, _ in every:
        if task is not None and task not in chosen:
            raise ValueError(f"--set {task}.{name}: the task {task!r} is not among those of --tasks")
    return {
        task: TASKS[task].defaults._replace(**{name: value for of, name, value in every if of in (None, task)})  # type: ignore[arg-type]
        for task in chosen
    }


def _suggest(word: str, known: Mapping[str, object] | Sequence[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def name(text: str) -> str:
    if not text or machine.slug(text) != text:
        raise argparse.ArgumentTypeError(
            f"{text!r} is to be part of a file's name: write it in small letters, digits and hyphens"
        )
    return text


def without_folders(given: Sequence[str]) -> list[str]:
    """The command as the result file has it: where files lie is nobody's business."""
    kept, skip = [], False
    for argument in given:
        if skip or argument.startswith(("--cache=", "--out=")):
            skip = False
        elif argument in ("--cache", "--out"):
            skip = True
        else:
            kept.append(argument)
    return kept


def parser(about: str | None, examples: str, do: Mapping[str, Callable[[argparse.Namespace], int]]) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="scripts/study.py",
        description=about,
        epilog="\n".join([*_told_tasks(), "", examples]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    kinds = made.add_subparsers(required=True, metavar="run|report")
    one = kinds.add_parser("run", help="makes the runs that are missing, then the report", allow_abbrev=False)
    one.add_argument("--tasks", type=tasks, default=list(TASKS), help=f"(default {','.join(TASKS)})")
    one.add_argument("--specs", type=specs, required=True, help="separated by semicolons; dense is always among them")
    one.add_argument("--seeds", type=seeds, default=5, help="two or more (default 5)")
    one.add_argument("--ranks", type=positive, default=4, help="that are simulated (default 4)")
    one.add_argument("--jobs", type=positive, default=1, help="processes of one thread each (default 1)")
    one.add_argument(
        "--set", type=changes, action="append", default=[], metavar="NAME=VALUE,...", help="settings of all tasks, or TASK.NAME"
    )
    two = kinds.add_parser("report", help="the report alone, of the runs that are there", allow_abbrev=False)
    for kind, command in (("run", one), ("report", two)):
        add_places(command, "compare", machine.ROOT / "build" / "study")
        command.set_defaults(do=do[kind])
    return made


def add_places(command: argparse.ArgumentParser, called: str, cache: Path) -> None:
    """What the result is called, where results go, and where what took long is kept."""
    out = machine.ROOT / "benchmarks" / "results"
    command.add_argument("--name", type=name, default=called, help=f"of the result (default {called})")
    command.add_argument("--cache", type=Path, default=cache, help=f"(default {cache.relative_to(machine.ROOT)})")
    command.add_argument("--out", type=Path, default=out, help=f"(default {out.relative_to(machine.ROOT)})")


def _told_tasks() -> list[str]:
    rows = []
    for task, kind in TASKS.items():
        rows.append(f"  {task:5} {kind.about}: {', '.join(f'{k}={v}' for k, v in kind.defaults._asdict().items())}")
    return ["tasks and their settings:", *rows]
