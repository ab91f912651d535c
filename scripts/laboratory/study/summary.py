"""The figures, table and picture of a study: scores against dense's over the same seeds, bytes, steps to a loss, curves."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from laboratory import stats
from laboratory.harness.records import Record
from laboratory.report import plots, tables
from laboratory.report.tables import figure
from laboratory.tasks.table import TASKS

# The share of dense's steps after which its training loss is the goal of the others.
GOAL_AT = 0.8

# Steps between two points of a curve in the result file.
POINTS = 20

Line = dict[str, Any]
BySeed = dict[int, Record]
BySpec = dict[str, BySeed]


def summarize(task: str, records: BySpec) -> list[Line]:
    """Return a line for every spec, dense first. Only seeds that dense has too count; a line needs two."""
    dense = records["dense"]
    return [_line(task, spec, by_seed, dense) for spec, by_seed in records.items() if len(by_seed.keys() & dense.keys()) >= 2]


def _line(task: str, spec: str, by_seed: BySeed, dense: BySeed) -> Line:
    seeds = sorted(by_seed.keys() & dense.keys())
    own, others = [by_seed[seed] for seed in seeds], [dense[seed] for seed in seeds]
    scores = [score_of(record) for record in own]
    sign = -1 if TASKS[task].higher_is_better else 1
    worse = [sign * (a - score_of(b)) for a, b in zip(scores, others, strict=True)]
    losses = _curve(own)
    steps, reached = max(1, round(GOAL_AT * len(losses))), _reached(own, others)
    bytes_sent = list(itertools.accumulate(stats.mean_curve([record["sent"] for record in own])))
    kept = sorted({*range(POINTS - 1, len(losses), POINTS), len(losses) - 1})
    return {
        "spec": spec,
        "seeds": seeds,
        "scores": [or_none(score) for score in scores],
        "score": or_none(statistics.fmean(scores)),
        "score_error": or_none(stats.standard_error(scores)),
        "worse_than_dense": or_none(statistics.fmean(worse)),
        "worse_at_most": or_none(stats.upper_bound(worse)) if spec != "dense" else 0.0,
        "bytes_sent": round(bytes_sent[-1]),
        "compression": sum(4 * r["parameters"] * len(r["sent"]) for r in own) / max(1, sum(sum(r["sent"]) for r in own)),
        "steps_to_loss": reached,
        "times_the_steps": reached / steps if reached is not None else None,
        "times_at_most": _times_at_most(own, others, reached, steps) if spec != "dense" else 1.0,
        "seconds": round(statistics.median(record["seconds"] for record in own), 1),
        "curve": {
            "step": [i + 1 for i in kept],
            "bytes": [round(bytes_sent[i]) for i in kept],
            "loss": [or_none(losses[i]) for i in kept],
        },
    }


def _curve(records: Sequence[Record]) -> list[float]:
    return stats.smooth(stats.mean_curve([_losses(record) for record in records]))


def _reached(own: Sequence[Record], dense: Sequence[Record]) -> int | None:
    goals = _curve(dense)
    return stats.steps_to(_curve(own), goals[max(1, round(GOAL_AT * len(goals))) - 1])


def _times_at_most(own: Sequence[Record], dense: Sequence[Record], reached: int | None, steps: int) -> float | None:
    """Bound the multiple of the steps, by the jackknife: what changes when a seed is left out. None if it may be "never"."""
    without = [_reached([*own[:i], *own[i + 1 :]], [*dense[:i], *dense[i + 1 :]]) for i in range(len(own))]
    found = [each for each in without if each is not None]
    if reached is None or len(found) < len(without):
        return None
    return or_none(stats.upper_bound([len(own) * reached - (len(own) - 1) * each for each in found]) / steps)


def score_of(record: Record) -> float:
    """Return the score at the end; NaN where the training diverged."""
    return number(record["scores"][-1][2])


def number(value: float | None) -> float:
    """Read a figure of a record; null stands for NaN."""
    return math.nan if value is None else value


def or_none(value: float) -> float | None:
    """Round a figure for a result file; None stands for NaN."""
    return round(value, 6) if math.isfinite(value) else None


def _losses(record: Record) -> list[float]:
    return [number(loss) for loss in record["losses"]]


def markdown(task: str, lines: Sequence[Line]) -> str:
    """Write the table of one task."""
    kind, seeds = TASKS[task], sorted({len(line["seeds"]) for line in lines})
    heads = [
        "spec",
        kind.score_name,
        "worse than dense",
        "at most (95 %)",
        "bytes, dense / sent",
        "steps to dense's loss",
        "at most (95 %)",
    ]
    with_errors = any(line.get("squared_error") is not None for line in lines)  # older records have some
    rows = [[*heads, "relative squared error"] if with_errors else heads]
    for line in lines:
        dense = line["spec"] == "dense"
        cells = [
            f"`{line['spec']}`",
            figure(line["score"], "{:.2f}", "diverged"),
            "" if dense else figure(line["worse_than_dense"], "{:+.3f}", "diverged"),
            "" if dense else figure(line["worse_at_most"], "{:+.3f}", "diverged"),
            f"{line['compression']:,.1f} x",
            figure(line["times_the_steps"], "{:.2f} x", "never"),
            "" if dense else figure(line["times_at_most"], "{:.2f} x", "never"),
        ]
        rows.append([*cells, figure(line.get("squared_error"), "{:.3f}", "")] if with_errors else cells)
    return f"{task}: {kind.about}; {'/'.join(map(str, seeds))} seeds\n\n{tables.markdown(rows)}"


def draw(task: str, settings: str, lines: Sequence[Line], path: Path) -> None:
    """Draw two panels. A spec has its colour and mark in both."""
    height = 4.6 + 0.2 * math.ceil(len(lines) / 2)
    picture, (left, right) = plots.pyplot().subplots(1, 2, figsize=(11, height), layout="constrained")
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
    picture.suptitle(f"{task}: {settings}")
    plots.legend_below(picture, markerscale=1.8, handlelength=4)
    plots.save(picture, path)
