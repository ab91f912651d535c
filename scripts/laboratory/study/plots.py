"""A task's picture: score and training loss against the bytes that a rank sent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from laboratory.report import plots
from laboratory.study.summary import Line
from laboratory.tasks.table import TASKS

# Scores are drawn side by side, or one would hide the other, where their bytes differ by at most this factor.
SIDE_BY_SIDE_FACTOR = 1.1

# The factor between two neighbours: the axis is logarithmic.
NEIGHBOUR_FACTOR = 1.06


def beside(sent: Sequence[float]) -> list[float]:
    """Return a factor for each point's horizontal position, so that points with nearly equal bytes stand side by side."""
    factors = [1.0] * len(sent)
    waiting = sorted(range(len(sent)), key=lambda i: sent[i])
    while waiting:
        alike = [i for i in waiting if sent[i] <= SIDE_BY_SIDE_FACTOR * sent[waiting[0]]]
        for place, i in enumerate(alike):
            factors[i] = NEIGHBOUR_FACTOR ** (place - (len(alike) - 1) / 2)
        waiting = waiting[len(alike) :]
    return factors


def draw(task: str, settings: str, lines: Sequence[Line], path: Path) -> None:
    """Draw two panels. A spec has its colour and mark in both."""
    height = 4.6 + 0.2 * math.ceil(len(lines) / 2)
    figure, (left, right) = plots.pyplot().subplots(1, 2, figsize=(11, height), layout="constrained")
    factors = beside([line["bytes_sent"] for line in lines])
    for i, line in enumerate(lines):
        colour, mark, dashes = plots.style(i, line["spec"])
        if line["score"] is not None:
            at, error = factors[i] * line["bytes_sent"] / 1e6, line["score_error"]
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
    if any(factor != 1 for factor in factors):
        left.set_xlabel("MB sent by a rank (about equal bytes stand side by side)")
    figure.suptitle(f"{task}: {settings}")
    plots.legend_below(figure, markerscale=1.8, handlelength=4)
    plots.save(figure, path)
