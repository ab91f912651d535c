"""The visual language of the drawings: bars, boxes, tables and arrows on a white card, from top to bottom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

# Units of the card. A phone shows it as wide as the screen; a larger screen shows 1.3 pixels a unit.
WIDTH, MARGIN, GAP, PIXELS = 400, 12, 12, 1.3

INK, MUTED, AXIS = "#24292f", "#5f6873", "#b0b7c0"
WAITS, SENT, UPDATE, RESIDUAL = "#9aa7b5", "#e07b00", "#0f8f83", "#8a6fc4"
PAPER, FRAME, MESSAGE = "#ffffff", "#c8ccd4", "#fff6ea"

SANS = "Roboto, Helvetica, Arial, sans-serif"


def number(value: float, digits: int = 3) -> str:
    """Write a number with few digits and a true minus sign."""
    text = f"{value:.{digits}g}"
    return "0" if float(text) == 0 else text.replace("-", "−")


@dataclass
class Panel:
    """Bars of one rank's entries. lines: dashed levels; dots: a mark at each entry's rounded value; labelled: write values."""

    title: str
    values: Sequence[float]
    colours: Sequence[str]
    lines: Sequence[float] = ()
    dots: Sequence[float] = ()
    labelled: bool = True


@dataclass
class Canvas:
    """An SVG picture that grows downwards."""

    title: str
    parts: list[str] = field(default_factory=list)
    y: float = 8

    def text(self, x: float, y: float, words: str, size: float = 11, colour: str = INK, more: str = "") -> None:
        """Write a line. more: further attributes."""
        self.parts.append(
            f'<text x="{_n(x)}" y="{_n(y)}" font-size="{_n(size)}" fill="{colour}"{more and " " + more}>{escape(words)}</text>'
        )

    def heading(self, words: str, colour: str) -> None:
        """Begin a section: a coloured square and its name."""
        self.y += 8
        self._rect(MARGIN, self.y, 10, 10, f'fill="{colour}" rx="2"')
        self.text(MARGIN + 16, self.y + 9.5, words, 12.5, more='font-weight="bold"')
        self.y += 18

    def note(self, *lines: str) -> None:
        """Write lines of muted text."""
        for line in lines:
            self.text(MARGIN, self.y + 10, line, 11, MUTED)
            self.y += 15

    def arrow(self, words: str) -> None:
        """Draw an arrow downwards, with words beside it."""
        x, top = MARGIN + 5, self.y + 3
        self.parts.append(
            f'<path d="M{_n(x)} {_n(top)} V{_n(top + 14)} m-4 -5 l4 5 l4 -5" fill="none" stroke="{MUTED}" stroke-width="1.5"/>'
        )
        self.text(x + 12, top + 11, words, 11, MUTED)
        self.y += 22

    def boxes(self, texts: Sequence[Sequence[str]], columns: int = 2) -> None:
        """Draw messages side by side."""
        width, height = _width(columns), 8 + 14 * max(len(lines) for lines in texts)
        for place, lines in enumerate(texts):
            x, y = MARGIN + place % columns * (width + GAP), self.y + place // columns * (height + 6)
            self._rect(x, y, width, height, f'fill="{MESSAGE}" stroke="{SENT}" rx="4"')
            for row, line in enumerate(lines):
                self.text(x + 7, y + 15 + 14 * row, line, 10.5)
        self.y += -(-len(texts) // columns) * (height + 6)

    def panels(self, panels: Sequence[Panel], scale: float, columns: int = 2, height: float = 52) -> None:
        """Draw panels side by side. scale: the magnitude of a bar as long as half the height."""
        width = _width(columns)
        ends = [value for panel in panels for value in (*panel.values, *panel.lines, *panel.dots)]
        unit = height / 2 / scale
        above, below = unit * max(0.0, *ends) + 3, unit * max(0.0, *(-value for value in ends)) + 3
        labelled = 12 if any(panel.labelled for panel in panels) else 0
        titled = 13 if any(panel.title for panel in panels) else 0
        whole = titled + above + below + labelled
        for place, panel in enumerate(panels):
            x, y = MARGIN + place % columns * (width + GAP), self.y + place // columns * (whole + 6)
            if panel.title:
                self.text(x, y + 9, panel.title, 10.5, MUTED)
            self._bars(panel, x, y + titled + above, width, unit, below)
        self.y += -(-len(panels) // columns) * (whole + 6)

    def _bars(self, panel: Panel, x: float, zero: float, width: float, unit: float, below: float) -> None:
        step = width / len(panel.values)
        for level in panel.lines:
            self._line(x, zero - unit * level, x + width, f'stroke="{SENT}" stroke-dasharray="4 3" stroke-width="0.8"')
        thick = step * (0.62 if len(panel.values) <= 16 else 0.8)
        for place, (value, colour) in enumerate(zip(panel.values, panel.colours, strict=True)):
            long = unit * abs(value)
            left = x + step * place + (step - thick) / 2
            if value:
                self._rect(left, zero - (long if value > 0 else 0), thick, long, f'fill="{colour}"')
            if panel.dots:
                centre = f'cx="{_n(left + thick / 2)}" cy="{_n(zero - unit * panel.dots[place])}"'
                self.parts.append(f'<circle {centre} r="3" fill="{PAPER}" stroke="{SENT}" stroke-width="1.6"/>')
            if panel.labelled:
                label = MUTED if colour == WAITS or not value else colour
                self.text(left + thick / 2, zero + below + 10, number(value), 9.5, label, 'text-anchor="middle"')
        self._line(x, zero, x + width, f'stroke="{AXIS}"')

    def tables(self, tables: Sequence[tuple[str, Sequence[Sequence[float]]]], columns: int = 2, colour: str = SENT) -> None:
        """Draw tables of numbers side by side: the stronger a cell, the larger its magnitude."""
        width = _width(columns)
        largest = max(abs(cell) for _, rows in tables for row in rows for cell in row) or 1.0
        for place, (title, rows) in enumerate(tables):
            x, side = MARGIN + place % columns * (width + GAP), width / len(rows[0])
            self.text(x, self.y + 9, title, 10.5, MUTED)
            for down, row in enumerate(rows):
                for across, cell in enumerate(row):
                    style = f'fill="{colour}" fill-opacity="{abs(cell) / largest:.2f}" stroke="{AXIS}" stroke-width="0.5"'
                    self._rect(x + side * across, self.y + 13 + 11 * down, side, 11, style)
        self.y += 19 + 11 * max(len(rows) for _, rows in tables)

    def svg(self) -> str:
        """Return the picture's text."""
        height = self.y + 8
        size = f'viewBox="0 0 {WIDTH} {_n(height)}" width="{_n(WIDTH * PIXELS)}" height="{_n(height * PIXELS)}"'
        frame = f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{_n(height - 1)}" rx="8" fill="{PAPER}" stroke="{FRAME}"/>'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="{SANS}">'
        return "\n".join([head, f"<title>{escape(self.title)}</title>", frame, *self.parts, "</svg>"]) + "\n"

    def _rect(self, x: float, y: float, width: float, height: float, style: str) -> None:
        self.parts.append(f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" {style}/>')

    def _line(self, x: float, y: float, end: float, style: str) -> None:
        self.parts.append(f'<line x1="{_n(x)}" y1="{_n(y)}" x2="{_n(end)}" y2="{_n(y)}" {style}/>')


def _width(columns: int) -> float:
    return (WIDTH - 2 * MARGIN - (columns - 1) * GAP) / columns


def _n(value: float) -> str:
    """Write a coordinate to a tenth of a unit."""
    return f"{value + 0.0:.1f}".removesuffix(".0")
