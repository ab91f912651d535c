"""A task's picture: its score, and its training loss, against the bytes that a rank sent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from studylib.summary import Line
from studylib.tasks import TASKS

MARKS = "osD^vPX*<>"


def style(i: int, spec: str) -> tuple[str, str]:
    """The colour and the mark of the i-th spec."""
    return "black" if spec == "dense" else f"C{i % 10}", MARKS[i % len(MARKS)]


def gaps(values: Sequence[float | None]) -> list[float]:
    """What is not a number is left out of a line."""
    return [math.nan if value is None else value for value in values]


def grid(axes: Any) -> None:
    """Lines to read values by; a logarithmic axis from left to right says 100, not a power."""
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(which="both", alpha=0.25)


def save(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
    return path


def draw(task: str, settings: str, lines: Sequence[Line], path: Path) -> Path:
    """One PNG of two panels; every spec has its colour and its mark in both."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.6 + 0.2 * math.ceil(len(lines) / 2)), layout="constrained")
    for i, line in enumerate(lines):
        colour, mark = style(i, line["spec"])
        label = f"{line['spec']}  ({line['compression']:,.0f} x)"
        if line["score"] is not None:
            error = line["score_error"]
            left.errorbar(line["bytes_sent"] / 1e6, line["score"], error, color=colour, fmt=mark, capsize=4, label=label)
        curve = line["curve"]
        sent = [bytes_ / 1e6 for bytes_ in curve["bytes"]]
        right.plot(sent, gaps(curve["loss"]), color=colour, marker=mark, markersize=3, linewidth=1.2)
    left.set_ylabel(f"{TASKS[task].score_name} (mean, standard error)")
    right.set_ylabel("training loss (mean of 10 steps)")
    drawn = [loss for line in lines for loss in line["curve"]["loss"] if loss]
    if drawn and max(drawn) > 10 * min(drawn):
        right.set_yscale("log")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xlabel("MB sent by a rank")
        grid(axes)
    figure.suptitle(f"{task}: {settings}")
    figure.legend(loc="outside lower center", ncols=2, fontsize="small", frameon=False)
    return save(figure, path)
