"""From the records of all runs to the figures of a report: scores against dense's over the same seeds, bytes, steps, curves."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from studylib import stats
from studylib.tasks import TASKS
from studylib.train import Record

GOAL_AT = 0.8
"""The share of dense's steps after which its training loss is the one that others are timed to."""
POINTS = 20
"""Steps between two points of a curve that is kept."""

Line = dict[str, Any]
BySeed = Mapping[int, Record]


def summarize(task: str, records: Mapping[str, BySeed]) -> list[Line]:
    """A line for every spec, dense first. Only seeds that dense has too count, and two of them are needed."""
    dense = records["dense"]
    return [_line(task, spec, by_seed, dense) for spec, by_seed in records.items() if len(by_seed.keys() & dense.keys()) >= 2]


def _line(task: str, spec: str, by_seed: BySeed, dense: BySeed) -> Line:
    seeds = sorted(by_seed.keys() & dense.keys())
    own, its = [by_seed[seed] for seed in seeds], [dense[seed] for seed in seeds]
    scores = [number(record["score"]) for record in own]
    sign = -1 if TASKS[task].higher_is_better else 1
    worse = [sign * (a - number(b["score"])) for a, b in zip(scores, its, strict=True)]
    losses, dense_losses = (stats.smooth(stats.mean_curve([_losses(r) for r in records])) for records in (own, its))
    steps = max(1, round(GOAL_AT * len(dense_losses)))
    reached = stats.steps_to(losses, dense_losses[steps - 1])
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
        "squared_error": _squared_error(own),
        "bytes_sent": round(bytes_sent[-1]),
        "compression": sum(r["dense_bytes"] for r in own) / max(1, sum(sum(r["sent"]) for r in own)),
        "steps_to_loss": reached,
        "times_the_steps": reached / steps if reached is not None else None,
        "seconds": round(statistics.median(record["seconds"] for record in own), 1),
        "curve": {
            "step": [i + 1 for i in kept],
            "bytes": [round(bytes_sent[i]) for i in kept],
            "loss": [or_none(losses[i]) for i in kept],
        },
    }


def number(value: float | None) -> float:
    """A figure of a record, in which null stands for what is not a number."""
    return math.nan if value is None else value


def or_none(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None


def _squared_error(records: Sequence[Record]) -> float | None:
    """The mean over runs; None if one of them was made before squares were noted."""
    if any("squares" not in record for record in records):
        return None
    return or_none(statistics.fmean(relative(**record["squares"]) for record in records))


def relative(meant: Sequence[float], left: Sequence[float]) -> float:
    """What is left of what was to be sent, as a mean over steps of their quotients: sums over all steps would be those of the
    steps in which gradients, or residuals, are largest, and which these are differs from spec to spec."""
    quotients = [of_left / of_meant for of_meant, of_left in zip(meant, left, strict=True) if of_meant]
    return statistics.fmean(quotients) if quotients else math.nan


def _losses(record: Record) -> list[float]:
    return [number(loss) for loss in record["losses"]]


def markdown(task: str, lines: Sequence[Line]) -> str:
    """The table of one task."""
    kind = TASKS[task]
    seeds = {len(line["seeds"]) for line in lines}
    heads = ["spec", kind.score_name, "worse than dense", "at most (95 %)", "bytes, dense / sent", "steps to dense's loss"]
    with_errors = any(line["squared_error"] is not None for line in lines)
    if with_errors:
        heads.append("relative squared error")
    rows = [
        f"{task}: {kind.about}; {'/'.join(map(str, sorted(seeds)))} seeds",
        "",
        f"| {' | '.join(heads)} |",
        f"|---|{'--:|' * (len(heads) - 1)}",
    ]
    for line in lines:
        named = line["spec"] == "dense"
        cells = [
            f"`{line['spec']}`",
            _told(line["score"], "{:.2f}"),
            "" if named else _told(line["worse_than_dense"], "{:+.3f}"),
            "" if named else _told(line["worse_at_most"], "{:+.3f}"),
            f"{line['compression']:,.1f} x",
            "never" if line["times_the_steps"] is None else f"{line['times_the_steps']:.2f} x",
        ]
        if with_errors:
            cells.append("" if line["squared_error"] is None else f"{line['squared_error']:.3f}")
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _told(value: float | None, form: str) -> str:
    return "diverged" if value is None else form.format(value)
