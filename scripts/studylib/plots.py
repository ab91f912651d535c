"""A task's picture: its score, and its training loss, against the bytes that a rank sent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from studylib.summary import Line
from studylib.tasks import TASKS


def draw(task: str, settings: str, lines: Sequence[Line], path: Path) -> Path:
    """One PNG of two panels; every spec has its colour and its mark in both."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.6 + 0.2 * math.ceil(len(lines) / 2)), layout="constrained")
    marks = "osD^vPX*<>"
    for i, line in enumerate(lines):
        colour = "black" if line["spec"] == "dense" else f"C{i % 10}"
        mark = marks[i % len(marks)]
        label = f"{line['spec']}  ({line['compression']:,.0f} x)"
        if line["score"] is not None:
            error = line["score_error"]
            left.errorbar(line["bytes_sent"] / 1e6, line["score"], error, color=colour, fmt=mark, capsize=4, label=label)
        curve = line["curve"]
        sent = [bytes_ / 1e6 for bytes_ in curve["bytes"]]
        losses = [math.nan if loss is None else loss for loss in curve["loss"]]
        right.plot(sent, losses, color=colour, marker=mark, markersize=3, linewidth=1.2)
    left.set_ylabel(f"{TASKS[task].score_name} (mean, standard error)")
    right.set_ylabel("training loss (mean of 10 steps)")
    drawn = [loss for line in lines for loss in line["curve"]["loss"] if loss]
    if drawn and max(drawn) > 10 * min(drawn):
        right.set_yscale("log")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("MB sent by a rank")
        axes.grid(which="both", alpha=0.25)
    figure.suptitle(f"{task}: {settings}")
    figure.legend(loc="outside lower center", ncols=2, fontsize="small", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
    return path
