"""Tables in columns, progress in place or in lines, and result files."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def table(rows: Sequence[Sequence[str]]) -> str:
    """The first row is the heading, the first column is text, the others are figures."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(line.rstrip() for line in lines)


def milliseconds(seconds: float) -> str:
    """Three figures or more, whatever the size."""
    ms = 1000 * seconds
    return f"{ms:.0f}" if ms >= 1000 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}" if ms >= 1 else f"{ms:.4f}"


class Progress:
    """One line that is written over on a terminal; else a line every few seconds."""

    def __init__(self, every: float = 10.0):
        self._every = every
        self._began = self._said = time.monotonic()

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        if sys.stderr.isatty():
            print(f"\r\033[K{text}  {now - self._began:.0f} s", end="", file=sys.stderr, flush=True)
        elif now - self._said >= self._every:
            self._said = now
            print(f"{text}  {now - self._began:.0f} s", file=sys.stderr, flush=True)

    def end(self) -> None:
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)


class Left:
    """How long the rest of a list of work will take, if it goes on as it went so far."""

    def __init__(self, work: Iterable[float]):
        self._began, self._done, self._left = time.monotonic(), 0.0, sum(work)

    def after(self, work: float) -> str:
        """Says so, now that this piece is done."""
        self._done += work
        self._left -= work
        return f"{(time.monotonic() - self._began) / self._done * self._left / 60:.0f} min left"


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(path)
