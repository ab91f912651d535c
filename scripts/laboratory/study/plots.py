"""A task's picture: score and training loss against the bytes that a rank sent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from laboratory.report import plots
from laboratory.study.summary import Line
from laboratory.tasks.table import TASKS


def draw(task: str, settings: str, lines: Sequence[Line], path: Path) -> None:
    """Draw two panels. A spec has its colour and mark in both."""
    height = 4.6 + 0.2 * math.ceil(len(lines) / 2)
    figure, (left, right) = plots.pyplot().subplots(1, 2, figsize=(11, height), layout="constrained")
    for i, line in enumerate(lines):
        colour, mark, dashes = plots.style(i, line["spec"])
        if line["score"] is not None:
            at, error = line["bytes_sent"] / 1e6, line["score_error"]
            left.errorbar(at, line["score"], error, color=colour, fmt=mark, capsize=3)
        curve = line["curve"]
        sent = [bytes_ / 1e6 for bytes_ in curve["bytes"]]
        drawn = {"color": colour, "marker": mark, "linestyle": dashes, "markersize": 3, "linewidth": 1.2}
        right.plot(sent, plots.gaps(curve["loss"]), label=f"{line['spec']}  ({line['compression']:,.0f} x)", **drawn)
    left.set_ylabel(f"{TASKS[task].score_name} (mean, standard error)")
    right.set_ylabel("training loss (mean of 10 steps)")
    losses = [loss for line in lines for loss in line["curve"]["loss"] if loss]
    if losses and max(losses) > 10 * min(losses):
        right.set_yscale("log")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xlabel("MB sent by a rank")
        plots.grid(axes)
    figure.suptitle(f"{task}: {settings}")
    plots.legend_below(figure, markerscale=1.8, handlelength=4)
    plots.save(figure, path)
