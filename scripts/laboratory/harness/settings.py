"""Options of a training, checked before anything begins: tasks, seeds, settings."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from laboratory.options import Refused, suggest
from laboratory.tasks.table import TASKS
from laboratory.tasks.task import BELOW_1, FROM_0, OF_SOME, WHOLE, Settings

# A task, or None for all of them, one of its settings, and the new value.
Change = tuple[str | None, str, float]


def task(name: str) -> str:
    """Read the name of a task."""
    if name not in TASKS:
        raise argparse.ArgumentTypeError(f"unknown task {name!r}{suggest(name, TASKS)}; known: {', '.join(TASKS)}")
    return name


def add_changes(parser: argparse.ArgumentParser) -> None:
    """Add the option that changes settings."""
    text = "change a setting of all tasks (lr=0.1), or of one (conv.lr=0.1)"
    parser.add_argument("--set", type=changes, action="append", default=[], metavar="NAME=VALUE,...", help=text)


def changes(text: str) -> list[Change]:
    """Read steps=200,mlp.lr=0.05."""
    found: list[Change] = []
    for part in text.split(","):
        left, _, right = part.partition("=")
        of, dot, name = left.strip().rpartition(".")
        if name not in Settings._fields:
            known = f"{suggest(name, Settings._fields)}; known: {', '.join(Settings._fields)}"
            raise argparse.ArgumentTypeError(f"unknown setting {name!r}{known}")
        found.append((task(of) if dot else None, name, _value(name, right.strip())))
    return found


def _value(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    fits, kind = value > 0, "a number above 0"
    if name in WHOLE:
        fits, kind = value >= 1 and value % 1 == 0, "a whole number above 0"
    elif name in BELOW_1:
        fits, kind = 0 <= value < 1, "a number in [0, 1)"
    elif name in FROM_0:
        fits, kind = value >= 0, "a number from 0 on"
    if not math.isfinite(value) or not fits:
        raise argparse.ArgumentTypeError(f"{name}={text!r} is not {kind}")
    return int(value) if name in WHOLE else value


def settle(chosen: Sequence[str], changed: Sequence[Sequence[Change]]) -> dict[str, Settings]:
    """Return the settings of every chosen task. A change of one task takes precedence over a change of all."""
    found = {name: TASKS[name].defaults for name in chosen}
    for of, name, value in sorted((change for some in changed for change in some), key=lambda change: change[0] is not None):
        if of is not None and of not in chosen:
            raise Refused(f"--set {of}.{name}: --tasks does not contain {of!r}; add it there")
        for each in chosen if of is None else [of]:
            if name not in settings_of(each):
                raise Refused(f"--set {name}: {each} has no {name}; name the task that has, for example cifar.{name}")
            found[each] = found[each]._replace(**{name: value})  # type: ignore[arg-type]
    return found


def described() -> str:
    """List the tasks with their settings."""
    rows = ["tasks and their settings:"]
    for name, kind in TASKS.items():
        rows.append(f"  {name:11} {kind.about}: {', '.join(f'{k}={v}' for k, v in settings_of(name).items())}")
    return "\n".join(rows)


def settings_of(name: str) -> dict[str, float]:
    """Return a task's settings, with their defaults."""
    return {of: value for of, value in TASKS[name].defaults._asdict().items() if value or of not in OF_SOME}
