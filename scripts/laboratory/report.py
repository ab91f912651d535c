"""What a measurement leaves: its result file, written whole, tables for a terminal and in Markdown, and a line of progress."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from laboratory import machine
from laboratory.options import Refused

Rows = Sequence[Sequence[str]]


def path_of(chosen: argparse.Namespace, name: str | None) -> Path:
    """Name a file in --out after the subcommand and --name, or this name where none was given."""
    stem = "-".join(filter(None, (chosen.subcommand, chosen.name or name)))
    return Path(chosen.out) / f"{stem}.json"


def save(chosen: argparse.Namespace, name: str | None, content: Mapping[str, Any]) -> None:
    """Write a subcommand's result, under path_of's name, after the kind, command, commit, machine and versions."""
    path = path_of(chosen, name)
    write(path, {"what": chosen.subcommand, **machine.origin(chosen.command), **content})
    print(f"written: {path}")


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(path)


def read(path: Path) -> dict[str, Any]:
    """Read a JSON file."""
    try:
        return dict(json.loads(path.read_text()))
    except ValueError:
        raise Refused(f"{path.name} in {path.parent.name} is not JSON; delete it, and it is made again") from None


def columns(rows: Rows) -> str:
    """Align the rows in columns. The first row is the heading, the first column is text, the others are figures."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(line.rstrip() for line in lines)


def markdown(rows: Rows) -> str:
    """Write the same rows as a table in Markdown."""
    heading, *rest = rows
    lines = ["|".join(["", *(f" {cell} " for cell in cells), ""]) for cells in (heading, *rest)]
    lines.insert(1, "|".join(["", "---", *["--:"] * (len(heading) - 1), ""]))
    return "\n".join(lines)


def filled(page: Path, text: str, place: str, rows: Rows | str) -> str:
    """Return a page's text with a table at the place that is marked for it. rows: of the table, or all of it in Markdown."""
    mark, end = f"<!-- records: {place} -->", "<!-- end -->"
    if text.count(mark) != 1:
        raise Refused(f"docs/{page.name} has {text.count(mark)} places {mark}; it needs one")
    before, _, after = text.partition(mark)
    return f"{before}{mark}\n\n{rows if isinstance(rows, str) else markdown(rows)}\n\n{end}{after.partition(end)[2]}"


def figure(value: Any, form: str, missing: str = "-") -> str:
    """Format a figure, or name what stands in its place where there is none."""
    return missing if value is None else form.format(value)


def milliseconds(ms: float) -> str:
    """Format with three figures or more, whatever the size."""
    return f"{ms:.0f}" if ms >= 1000 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}" if ms >= 1 else f"{ms:.4f}"


class Progress:
    """A line on stderr that is overwritten on a terminal. Elsewhere a new line at most every few seconds."""

    def __init__(self, every: float = 10.0):
        self._every = every
        self._began = self._said = time.monotonic()

    def __call__(self, text: str, share: float | None = None) -> None:
        """Show the text, after the share of the work that is done where that is known."""
        now = time.monotonic()
        line = f"{text}  {now - self._began:.0f} s"
        if sys.stderr.isatty():
            print("\r\033[K", figure(share, "{:.0%}  ", ""), line, sep="", end="", file=sys.stderr, flush=True)
        elif share == 1 or now - self._said >= self._every:
            self._said = now
            print(line, file=sys.stderr, flush=True)

    def end(self) -> None:
        """Clear the line."""
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)
