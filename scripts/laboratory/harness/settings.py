"""Options of a training, checked before anything begins: tasks, seeds, settings."""

from __future__ import annotations

import argparse
import difflib
import math
from collections.abc import Mapping, Sequence

from laboratory.options import positive
from laboratory.refusal import Refused
from laboratory.tasks.table import TASKS
from laboratory.tasks.task import BELOW_1, FROM_0, OF_SOME, WHOLE, Settings

# A task, or None for all of them, one of its settings, and the new value.
Change = tuple[str | None, str, float]


def tasks(text: str) -> list[str]:
    """Read mlp,conv."""
    found = [part.strip() for part in text.split(",") if part.strip()]
    for name in found:
        if name not in TASKS:
            raise argparse.ArgumentTypeError(f"unknown task {name!r}{_suggest(name, TASKS)}; known: {', '.join(TASKS)}")
        if found.count(name) > 1:
            raise argparse.ArgumentTypeError(f"{name!r} is given twice")
    if not found:
        raise argparse.ArgumentTypeError(f"no task is given; known: {', '.join(TASKS)}")
    return found


def seeds(text: str) -> int:
    """Read a number of seeds."""
    count = positive(text)
    if count < 2:
        raise argparse.ArgumentTypeError(f"{text!r}: a bound comes from differences between seeds; give at least two seeds")
    return count


def changes(text: str) -> list[Change]:
    """Read steps=200,mlp.lr=0.05."""
    found: list[Change] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        left, equals, right = part.partition("=")
        task, dot, name = left.strip().rpartition(".")
        if dot and task not in TASKS:
            raise argparse.ArgumentTypeError(f"unknown task {task!r}{_suggest(task, TASKS)}; known: {', '.join(TASKS)}")
        if name not in Settings._fields:
            known = f"{_suggest(name, Settings._fields)}; known: {', '.join(Settings._fields)}"
            raise argparse.ArgumentTypeError(f"unknown setting {name!r}{known}")
        found.append((task or None, name, _value(name, right.strip() if equals else "")))
    return found


def add_changes(parser: argparse.ArgumentParser) -> None:
    """Add the option that changes settings."""
    parser.add_argument(
        "--set",
        type=changes,
        action="append",
        default=[],
        metavar="NAME=VALUE,...",
        help="change a setting of all tasks (lr=0.1), or of one (conv.lr=0.1)",
    )


def _value(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    fits, kind = value > 0, "a number above 0"
    if name in WHOLE:
        fits, kind = value >= 1 and value == value // 1, "a whole number above 0"
    elif name in BELOW_1:
        fits, kind = 0 <= value < 1, "a number in [0, 1)"
    elif name in FROM_0:
        fits, kind = value >= 0, "a number from 0 on"
    if not math.isfinite(value) or not fits:
        raise argparse.ArgumentTypeError(f"{name}={text!r} is not {kind}")
    return int(value) if name in WHOLE else value


def settle(chosen: Sequence[str], changed: Sequence[Sequence[Change]]) -> dict[str, Settings]:
    """Return the settings of every chosen task. A change of one task takes precedence over a change of all."""
    every = sorted((change for some in changed for change in some), key=lambda change: change[0] is not None)
    for task, name, _ in every:
        if task is not None and task not in chosen:
            raise Refused(f"--set {task}.{name}: --tasks does not contain {task!r}; add it there")
        for without in (each for each in chosen if task in (None, each) and name not in settings_of(each)):
            raise Refused(f"--set {name}: {without} has no {name}; name the task that has, for example cifar.{name}")
    return {
        task: TASKS[task].defaults._replace(**{name: value for of, name, value in every if of in (None, task)})  # type: ignore[arg-type]
        for task in chosen
    }


def _suggest(word: str, known: Mapping[str, object] | Sequence[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def described() -> str:
    """List the tasks with their settings."""
    rows = ["tasks and their settings:"]
    for task, kind in TASKS.items():
        rows.append(f"  {task:11} {kind.about}: {', '.join(f'{k}={v}' for k, v in settings_of(task).items())}")
    return "\n".join(rows)


def settings_of(task: str) -> dict[str, float]:
    """Return a task's settings, with their defaults."""
    return {name: value for name, value in TASKS[task].defaults._asdict().items() if value or name not in OF_SOME}
