"""Charts as SVG that follow the light or dark scheme of the page around them, and are readable on a phone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

# Widths in pixels: of the sheet, of its margin, of a row's name.
WIDTH, MARGIN, NAME = 400, 8, 112
# Heights in pixels: of a row, and of a heading.
ROW, HEADING = 15, 26

STYLE = """\
.card { fill: #ffffff } text { fill: #24292f; font: 11.5px Roboto, Helvetica, Arial, sans-serif } .bold { font-weight: bold }
.muted { fill: #5f6873 } .line { stroke: #8b949e } .ours { fill: #0f8f83; stroke: #0f8f83 }
.other { fill: #9aa7b5; stroke: #76838f } .grid { stroke: #d0d7de } polyline.curve { fill: none; stroke-width: 1.5 }
.before { fill: #8594a3 } .sent { fill: #e07b00 } .residual { fill: #8a6fc4 } .update { fill: #0f8f83 }
.number { font-size: 9.5px; text-anchor: middle }
@media (prefers-color-scheme: dark) {
.card { fill: #1e2129 } text { fill: #e2e4e9 } .muted { fill: #a5adba } .ours { fill: #2bb3a6; stroke: #2bb3a6 }
.other { fill: #6b7686; stroke: #8e99a8 } .grid { stroke: #3a3f4a }
}"""


class Bar(NamedTuple):
    """What stands in one column of a row: a length, or none, and the words at its end."""

    length: float | None
    words: str


class Bounded(NamedTuple):
    """A row of a comparison with dense: how much worse, the bound of that, and the ratio of bytes."""

    name: str
    ratio: float
    worse: float
    most: float
    ours: bool


class Sheet:
    """A picture that grows downwards."""

    def __init__(self, title: str):
        self.title, self.height, self.parts = title, MARGIN, list[str]()

    def text(self, x: float, words: str, kind: str = "", end: bool = False, down: float = 0) -> None:
        """Write words on the current row, or below it, which end at x or begin there."""
        anchor = ' text-anchor="end"' if end else ""
        self.parts.append(f'<text x="{x:g}" y="{self.height + 11 + down:g}" class="{kind}"{anchor}>{escape(words)}</text>')

    def bar(self, x: float, width: float, kind: str) -> None:
        """Draw a bar on the current row."""
        self.parts.append(f'<rect x="{x:g}" y="{self.height + 2:g}" width="{max(width, 1):.1f}" height="10" class="{kind}"/>')

    def line(self, x: float, until: float, y: float, down: float = 0, kind: str = "line") -> None:
        """Draw a line from a point of the current row, to the right and down."""
        top = self.height + y
        self.parts.append(f'<line x1="{x:.1f}" y1="{top:g}" x2="{until:.1f}" y2="{top + down:g}" class="{kind}"/>')

    def dot(self, x: float, kind: str) -> None:
        """Draw a dot on the current row."""
        self.parts.append(f'<circle cx="{x:.1f}" cy="{self.height + 7:g}" r="3.5" class="{kind}"/>')

    def heading(self, words: str, kind: str = "bold") -> None:
        """Write a line above the rows that follow."""
        self.height += HEADING - ROW
        self.text(MARGIN, words, kind)
        self.height += ROW + 2

    def svg(self) -> str:
        """Return the picture's text."""
        height = self.height + MARGIN
        size = f'viewBox="0 0 {WIDTH} {height:g}" width="{1.2 * WIDTH:g}" height="{1.2 * height:g}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<title>{escape(self.title)}</title>'
        card = '<rect width="100%" height="100%" rx="6" class="card"/>'
        return "\n".join([head, f"<style>\n{STYLE}\n</style>", card, *self.parts, "</svg>"]) + "\n"


def bars(sheet: Sheet, rows: Sequence[tuple[str, bool, Sequence[Bar]]], words: float = 48) -> None:
    """Draw rows of one bar a column, all to one scale. A row has a name, and says whether it is gradcomp's.

    words: the room of the words beside a bar.
    """
    longest = max(bar.length or 0 for _, _, columns in rows for bar in columns)
    place = (WIDTH - MARGIN - NAME) / max(len(columns) for _, _, columns in rows)
    for name, ours, columns in rows:
        sheet.text(MARGIN, name, "bold" if ours else "")
        for at, bar in enumerate(columns):
            left = NAME + at * place
            width = (place - words) * (bar.length or 0) / longest
            if bar.length is not None:
                sheet.bar(left, width, "ours" if ours else "other")
            sheet.text(left + (width + 4 if bar.length is not None else 0), bar.words, "" if bar.length else "muted")
        sheet.height += ROW


def bounds(sheet: Sheet, rows: Sequence[Bounded], form: str) -> None:
    """Draw a dot for each row's difference to dense, and a line to the bound that it stays below."""
    low, high = min(0, *(row.worse for row in rows)), max(row.most for row in rows)
    left, right = NAME + 52, WIDTH - 104

    def x(value: float) -> float:
        return left + (right - left) * (value - low) / (high - low)

    sheet.line(x(0), x(0), -1, ROW * len(rows) + 2)
    for row in sorted(rows, key=lambda row: row.ratio):
        kind = "ours" if row.ours else "other"
        sheet.text(MARGIN, row.name, "bold" if row.ours else "")
        sheet.text(NAME + 38, f"{row.ratio:,.0f} x", end=True)
        sheet.line(x(row.worse), x(row.most), 7, kind=kind)
        sheet.line(x(row.most), x(row.most), 3, 8, kind=kind)
        sheet.dot(x(row.worse), kind)
        bound = f" (\N{LESS-THAN OR EQUAL TO} {form.format(row.most)})" if row.most > row.worse else ""
        words = f"{form.format(row.worse)}{bound}"
        sheet.text(WIDTH - MARGIN, words.replace("-", "\N{MINUS SIGN}"), end=True)
        sheet.height += ROW


class Curve(NamedTuple):
    """A line of a chart: its name, whether it is gradcomp's, and its values, one for each tick."""

    name: str
    ours: bool
    values: Sequence[float]


def curves(sheet: Sheet, lines: Sequence[Curve], ticks: Sequence[str], height: int) -> None:
    """Draw curves on a logarithmic scale, with a line at each power of ten, and their names at their ends."""
    low = math.floor(math.log10(min(min(line.values) for line in lines)))
    high = math.ceil(math.log10(max(max(line.values) for line in lines)))
    left, right = MARGIN + 44, WIDTH - NAME

    def y(value: float) -> float:
        return height * (high - math.log10(value)) / (high - low)

    sheet.height += 6
    for power in range(low, high + 1):
        sheet.line(left, right, y(10.0**power), kind="grid")
        sheet.text(left - 6, f"{10.0**power:,g}", "muted", end=True, down=y(10.0**power) - 7)
    xs = [left + (right - left) * at / (len(ticks) - 1) for at in range(len(ticks))]
    below = -math.inf
    for line in sorted(lines, key=lambda line: -line.values[-1]):
        points = " ".join(f"{x:.1f},{sheet.height + y(value):.1f}" for x, value in zip(xs, line.values, strict=True))
        sheet.parts.append(f'<polyline points="{points}" class="curve {"ours" if line.ours else "other"}"/>')
        below = max(below + 12, y(line.values[-1]) - 7)
        sheet.text(right + 6, line.name, "bold" if line.ours else "", down=below)
    sheet.height += height + 4
    for x, tick in zip(xs, ticks, strict=True):
        sheet.text(x + 8, tick, "muted", end=True)
    sheet.height += ROW
