"""A task's picture: its score, and its training loss, against the bytes that a rank sent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from studylib.summary import Line
from studylib.tasks import TASKS

COLOURS = 10
MARKS = "osD^vPX*<>h"
DASHES = ("-", "--", ":")

ALIKE = 1.1
"""Bytes that are no more than so many times others' are drawn beside them, or one would hide the other."""
APART = 1.06
"""The factor between two such places: the axis is logarithmic."""


class Style(NamedTuple):
    """What tells a spec from others in a picture."""

    colour: str
    mark: str
    line: str


def style(i: int, spec: str) -> Style:
    """That of the i-th spec: when colours begin again, marks and dashes are others."""
    colour = "black" if spec == "dense" else f"C{i % COLOURS}"
    return Style(colour, MARKS[i % len(MARKS)], DASHES[i // COLOURS % len(DASHES)])


def beside(sent: Sequence[float]) -> list[float]:
    """Where each is drawn, as a factor of its own place: those that are alike stand side by side about it."""
    factors = [1.0] * len(sent)
    waiting = sorted(range(len(sent)), key=lambda i: sent[i])
    while waiting:
        alike = [i for i in waiting if sent[i] <= ALIKE * sent[waiting[0]]]
        for place, i in enumerate(alike):
            factors[i] = APART ** (place - (len(alike) - 1) / 2)
        waiting = waiting[len(alike) :]
    return factors


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
    factors = beside([line["bytes_sent"] for line in lines])
    for i, line in enumerate(lines):
        colour, mark, dashes = style(i, line["spec"])
        if line["score"] is not None:
            at, error = factors[i] * line["bytes_sent"] / 1e6, line["score_error"]
            left.errorbar(at, line["score"], error, color=colour, fmt=mark, capsize=3)
        curve = line["curve"]
        sent = [bytes_ / 1e6 for bytes_ in curve["bytes"]]
        drawn = {"color": colour, "marker": mark, "linestyle": dashes, "markersize": 3, "linewidth": 1.2}
        right.plot(sent, gaps(curve["loss"]), label=f"{line['spec']}  ({line['compression']:,.0f} x)", **drawn)
    left.set_ylabel(f"{TASKS[task].score_name} (mean, standard error)")
    right.set_ylabel("training loss (mean of 10 steps)")
    losses = [loss for line in lines for loss in line["curve"]["loss"] if loss]
    if losses and max(losses) > 10 * min(losses):
        right.set_yscale("log")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xlabel("MB sent by a rank")
        grid(axes)
    if any(factor != 1 for factor in factors):
        left.set_xlabel("MB sent by a rank (what is about the same stands side by side)")
    figure.suptitle(f"{task}: {settings}")
    figure.legend(loc="outside lower center", ncols=2, fontsize="small", frameon=False, markerscale=1.8, handlelength=4)
    return save(figure, path)
