"""Pictures: matplotlib without a screen, a style for every spec, axes, and the file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

COLOURS = 10
MARKS = "osD^vPX*<>h"
DASHES = ("-", "--", ":")


class Style(NamedTuple):
    """The colour, mark and line of one spec in a picture."""

    colour: str
    mark: str
    line: str


def style(i: int, spec: str) -> Style:
    """Choose the i-th spec's style. Marks and dashes differ where colours repeat; dense is black."""
    colour = "black" if spec == "dense" else f"C{i % COLOURS}"
    return Style(colour, MARKS[i % len(MARKS)], DASHES[i // COLOURS % len(DASHES)])


def pyplot() -> Any:
    """Import matplotlib's pyplot for files alone. Late, because it takes a second."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as found

    return found


def gaps(values: Sequence[float | None]) -> list[float]:
    """Replace missing values by NaN, which leaves a gap in a line."""
    return [math.nan if value is None else value for value in values]


def grid(axes: Any) -> None:
    """Draw lines to read values by, and write 100 instead of a power on the horizontal axis."""
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(which="both", alpha=0.25)


def legend_below(figure: Any, **more: Any) -> None:
    """Put one legend of all lines under the panels."""
    figure.legend(loc="outside lower center", fontsize="small", frameon=False, **{"ncols": 2, **more})


def save(figure: Any, path: Path) -> None:
    """Write the picture, close it, and say where it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    pyplot().close(figure)
    print(f"drawn: {path}")
