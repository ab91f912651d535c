"""Tables: in columns for a terminal, and in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Rows = Sequence[Sequence[str]]


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


def figure(value: Any, form: str, missing: str = "-") -> str:
    """Format a figure, or name what stands in its place where there is none."""
    return missing if value is None else form.format(value)


def milliseconds(seconds: float) -> str:
    """Format with three figures or more, whatever the size."""
    ms = 1000 * seconds
    return f"{ms:.0f}" if ms >= 1000 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}" if ms >= 1 else f"{ms:.4f}"
