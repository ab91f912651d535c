"""The picture of a soak: memory, open files and step times of every process against the steps, with marks at the troubles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from laboratory.report import plots

PANELS = {"rss_kb": "memory, MB", "fds": "open files", "wall_ms": "step, ms", "residual": "norm of what waits"}
KINDS = {"pause": "0.8", "kill": "C3", "join": "C2", "leave": "C1"}
LAUNCH = "C4"


def draw(soaks: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draw one column for each network."""
    figure, every = plots.pyplot().subplots(
        len(PANELS), len(soaks), figsize=(7 * len(soaks), 11), sharex="col", squeeze=False, layout="constrained"
    )
    for column, (network, soak) in enumerate(soaks.items()):
        for row, (key, title) in enumerate(PANELS.items()):
            axes = every[row][column]
            _mark(axes, soak["troubles"])
            for i, own in enumerate(soak["processes"]):
                scale = 1 / 1024 if key == "rss_kb" else 1
                values = [scale * value for value in own[key]]
                axes.plot(own["step"], values, f"C{i % plots.COLOURS}", lw=0.8)
            axes.set_ylabel(title)
            if key in ("wall_ms", "residual"):
                axes.set_yscale("log")
            plots.grid(axes)
        every[0][column].set_title(f"{network}: {soak['ranks']} ranks; one line for each process")
        every[-1][column].set_xlabel("step")
    plots.legend_below(figure, handles=_handles(), ncols=5)
    plots.save(figure, path)


def _mark(axes: Any, troubles: Sequence[Mapping[str, Any]]) -> None:
    for trouble in troubles:
        kind = trouble["kind"]
        colour = KINDS.get(kind, LAUNCH)
        axes.axvline(trouble["step"], color=colour, lw=0.4 if kind == "pause" else 1.6, zorder=0)


def _handles() -> list[Any]:
    from matplotlib.lines import Line2D

    named = {"a pause": "0.8", "a rank is killed": "C3", "one joins": "C2", "one leaves": "C1", "a launch": LAUNCH}
    return [Line2D([], [], color=colour, lw=1.6, label=label) for label, colour in named.items()]
