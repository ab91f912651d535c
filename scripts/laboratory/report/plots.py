"""Pictures: matplotlib without a screen, axes, and the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def pyplot() -> Any:
    """Import matplotlib's pyplot for files alone. Late, because it takes a second."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as found

    return found


def grid(axes: Any) -> None:
    """Draw lines to read values by, and write 100 instead of a power on the horizontal axis."""
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(which="both", alpha=0.25)


def save(figure: Any, path: Path) -> None:
    """Write the picture, close it, and say where it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    pyplot().close(figure)
    print(f"drawn: {path}")
