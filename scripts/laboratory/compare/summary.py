"""Figures of a comparison: step times, throughput, claims, losses, and the seconds to a loss."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from laboratory import stats
from laboratory.compare.plan import CLAIMED_THROUGHPUTS, TASK, Plan, kind, parameters, peer
from laboratory.compare.steptimes import Timed, throughput
from laboratory.study.runs import BySeed, BySpec
from laboratory.study.summary import number, or_none, summarize
from laboratory.timing import Spread

Line = dict[str, Any]
Cluster = dict[str, Any]
Model = dict[str, Any]

# Points of a curve in the result file.
POINTS = 60


def model(plan: Plan, width: int, timed: Sequence[Mapping[str, Timed]], records: BySpec) -> Model:
    """Return all figures of one model. timed: the merged launches of each of plan.clusters()."""
    clusters = [
        {"hosts": hosts, "rate": rate, "lines": times_of(plan.specs, its)}
        for (hosts, rate), its in zip(plan.clusters(), timed, strict=True)
    ]
    return {
        "width": width,
        "parameters": parameters(width),
        "settings": plan.settings(width)._asdict(),
        "clusters": clusters,
        "training": training_of(records, clusters),
        "claims": claims_of(plan.specs, clusters),
    }


def times_of(specs: list[str], timed: Mapping[str, Timed]) -> list[Line]:
    """Return a line for every measured spec, none first, with its throughput over its peers'."""
    lines = []
    for spec in ["none", *specs]:
        if (own := timed.get(spec)) is None:
            continue
        peers = {of: peer(spec, of, specs) for of in CLAIMED_THROUGHPUTS} if spec != "none" else {}
        over = {
            of: throughput(own, timed[other])._asdict() for of, other in peers.items() if other is not None and other in timed
        }
        ratio = Spread.of(own.over_none)._asdict()
        lines.append(
            {"spec": spec, "ms": own.ms._asdict(), "ratio_to_none": ratio, "bytes_per_step": own.bytes, "throughput_over": over}
        )
    return lines


def claims_of(specs: list[str], clusters: Sequence[Cluster]) -> list[Line]:
    """Judge the claims for each gs_sgd on each cluster."""
    found = []
    for spec in (spec for spec in specs if kind(spec) == "gs_sgd"):
        for against, at_least in CLAIMED_THROUGHPUTS.items():
            for cluster in clusters:
                over = next((line["throughput_over"].get(against) for line in cluster["lines"] if line["spec"] == spec), None)
                if over is None:
                    continue
                claim = {"spec": spec, "against": peer(spec, against, specs), "at_least": at_least}
                where = {"hosts": cluster["hosts"], "rate": cluster["rate"]}
                found.append({**claim, **where, "throughput": over, "holds": over["median"] >= at_least})
    return found


def training_of(records: BySpec, clusters: Sequence[Cluster]) -> list[Line]:
    """Extend the study's line of each spec by its final loss, a finer curve, and the steps and seconds to two losses.

    The two losses are dense's loss at 80 % of its steps, and the lowest loss that all specs reach.
    """
    if len(records.get("dense", {})) < 2:
        return []
    lines = summarize(TASK, records)
    curves = {line["spec"]: [_losses(records[line["spec"]], seed) for seed in line["seeds"]] for line in lines}
    means = {spec: stats.smooth(stats.mean_curve(of_spec)) for spec, of_spec in curves.items()}
    common = max(min(filter(math.isfinite, mean), default=math.inf) for mean in means.values())
    return [
        {
            **line,
            **_in_the_end(curves[line["spec"]]),
            "seconds_to_loss": _seconds(line["spec"], line["steps_to_loss"], clusters),
            "common_loss": or_none(common),
            "steps_to_common": (steps := stats.steps_to(means[line["spec"]], common)),
            "seconds_to_common": _seconds(line["spec"], steps, clusters),
            "curve": _curve(curves[line["spec"]]),
        }
        for line in lines
    ]


def _losses(by_seed: BySeed, seed: int) -> list[float]:
    return [number(loss) for loss in by_seed[seed]["losses"]]


def _in_the_end(curves: Sequence[Sequence[float]]) -> Line:
    ends = [stats.smooth(curve)[-1] for curve in curves]
    return {"loss": or_none(statistics.fmean(ends)), "loss_error": or_none(stats.standard_error(ends))}


def _seconds(spec: str, steps: int | None, clusters: Sequence[Cluster]) -> list[float | None]:
    """Convert steps to seconds on each cluster."""
    return [None if ms is None or steps is None else steps * ms / 1000 for ms in ms_of(spec, clusters)]


def ms_of(spec: str, clusters: Sequence[Cluster]) -> list[float | None]:
    """Return the spec's median step on each cluster; None where it was not measured."""
    return [next((line["ms"]["median"] for line in cluster["lines"] if line["spec"] == spec), None) for cluster in clusters]


def _curve(curves: Sequence[Sequence[float]]) -> Line:
    """Return the smoothed loss against the steps: mean over the seeds, and standard error."""
    smoothed = [stats.smooth(curve) for curve in curves]
    steps = len(smoothed[0])
    kept = sorted({round((i + 1) * steps / POINTS) - 1 for i in range(POINTS)} & set(range(steps)))
    at = [[curve[i] for curve in smoothed] for i in kept]
    return {
        "step": [i + 1 for i in kept],
        "loss": [or_none(statistics.fmean(values)) for values in at],
        "error": [or_none(stats.standard_error(values)) for values in at],
    }
