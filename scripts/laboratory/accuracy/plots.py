"""A task's picture: the score against seconds, on each cluster."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from laboratory.accuracy.page import cluster, name
from laboratory.accuracy.plan import CHOOSING
from laboratory.accuracy.summary import Learning
from laboratory.report import plots
from laboratory.tasks.table import TASKS


def draw(task: str, learning: Learning, found: Mapping[str, Any], path: Path) -> None:
    """Draw a panel for each cluster, with a line for each way of its faster door."""
    every = found["clusters"]
    columns = max(1, len({cells["rate"] for cells in every}))
    rows = -(-len(every) // columns)
    figure, panels = plots.pyplot().subplots(
        rows, columns, figsize=(5 * columns, 3.6 * rows + 1.6), layout="constrained", sharey=True, squeeze=False
    )
    names = [way for way in learning.curves if way not in CHOOSING]
    for axes, cells in zip(panels.flat, every, strict=False):
        for i, way in enumerate(names):
            lines = [line for line in cells["lines"] if line["way"] == way]
            if not lines:
                continue
            line = min(lines, key=lambda line: float(line["ms"]))
            colour, mark, dashes = plots.style(i, "dense" if way == "stock" else way)
            seconds = [batch * line["ms"] / 1000 for batch, _ in learning.curves[way]]
            scores = [score for _, score in learning.curves[way]]
            drawn = {"color": colour, "marker": mark, "linestyle": dashes, "markersize": 3, "linewidth": 1.2}
            axes.plot(seconds, scores, label=name(line).replace("`", ""), **drawn)
        axes.axhline(learning.goal, color="grey", linewidth=0.8)
        axes.set_title(cluster(cells["hosts"], cells["rate"]))
        plots.log_seconds(axes)
        axes.set_xlabel("seconds")
        plots.grid(axes)
        if not TASKS[task].higher_is_better:
            axes.set_ylim(0.95 * learning.goal, 2 * learning.goal)
    for axes in panels[:, 0]:
        axes.set_ylabel(TASKS[task].score_name)
    handles, labels = panels.flat[0].get_legend_handles_labels()
    figure.suptitle(f"{task}: the score by time")
    plots.legend_below(figure, handles=handles, labels=labels, ncols=3, handlelength=4)
    plots.save(figure, path)
