"""The rounds of real ranks, in which all ways take turns: the summary of their times, and its table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from laboratory.report import columns, figure
from laboratory.timing import Spread, median_bounds

# The ways that every other is compared with: no exchange, and those that a user has without gradcomp.
RIVALS = ("none", "stock", "bf16", "alltoall", "mixed", "mixed-bf16", "mixed-alltoall")
# The rounds that a way is compared in.
PARTS = {"over": "", "over_before": ", before the change", "over_after": ", after it"}

# The rounds that a change of the links needs, at least: two before it, one with it, and two after it.
FEWEST = 5


def summary(raw: Mapping[str, Any], changes: bool = False) -> dict[str, Any]:
    """Return medians and ranges of the ranks' times. Ratios to other ways are taken within rounds.

    changes: the rate of the links changed on the way. The rounds before and after that are then summarised apart, too.
    """
    medians = {way: [Spread.of(steps).median for steps in each["rounds"]] for way, each in raw["ways"].items()}
    means = {way: [statistics.fmean(steps) for steps in each["rounds"]] for way, each in raw["ways"].items()}
    parts = {"over": slice(None)}
    if changes:
        at = changed_at(medians[next(iter(medians))])
        parts |= {"over_before": slice(at), "over_after": slice(at + 1, None)}
    lines = []
    for way, each in raw["ways"].items():
        steps = Spread.of([second for steps in each["rounds"] for second in steps])
        line: dict[str, Any] = {
            "way": way,
            "ms": {key: 1000 * value for key, value in steps._asdict().items()},
            "ms_of_rounds": [1000 * median for median in medians[way]],
            "bytes_per_step": each["bytes"],
            "compression": raw["bytes_dense"] / each["bytes"] if each["bytes"] else None,
            "loss": each["loss"],
        }
        rivals = [rival for rival in RIVALS if rival in means and rival != way]
        line |= {part: {rival: over(means[way][of], means[rival][of]) for rival in rivals} for part, of in parts.items()}
        line |= {name: each[name] for name in ("auto", "interface_bytes_per_step") if name in each}
        lines.append(line)
    return {"ranks": raw["ranks"], "parameters": raw["parameters"], "batch": raw["batch"], "lines": lines}


def changed_at(medians: Sequence[float]) -> int:
    """Return the round in which the links changed: the one that parts a way's rounds into the two most even parts.

    There are at least FEWEST rounds.
    """
    logs = [math.log(median) for median in medians]

    def uneven(at: int) -> float:
        return sum(len(part) * statistics.pvariance(part) for part in (logs[:at], logs[at + 1 :]))

    return min(range(2, len(logs) - 2), key=uneven)


def over(own: Sequence[float], rival: Sequence[float]) -> dict[str, float | None]:
    """Return the median of a way's time over a rival's in the rounds, and its upper bound with 95 % confidence."""
    ratios = [a / b for a, b in zip(own, rival, strict=True)]
    return {"median": statistics.median(ratios), "at_most": median_bounds(ratios)[1]}


def table(run: Mapping[str, Any]) -> str:
    """Write the table of a summary."""
    rivals = [rival for rival in RIVALS if any(rival in line["over"] for line in run["lines"])]
    parts = {part: said for part, said in PARTS.items() if any(part in line for line in run["lines"])}
    heading = ["", "ms per step", "min..max", "bytes per step", "compression"]
    compared = [f"x {rival}, at most{said}" for said in parts.values() for rival in rivals]
    counted = any("interface_bytes_per_step" in line for line in run["lines"])
    rows = [[*heading, *(["on a host's interface"] if counted else []), *compared]]
    for line in run["lines"]:
        ms = line["ms"]
        row = [
            line["way"],
            f"{ms['median']:.0f}",
            f"{ms['low']:.0f}..{ms['high']:.0f}",
            figure(line["bytes_per_step"], "{:,}"),
            figure(line["compression"], "{:.0f} x"),
        ]
        row += [figure(line["interface_bytes_per_step"], "{:,.0f}")] if counted else []
        ratios = [line[part].get(rival) for part in parts for rival in rivals]
        row += ["-" if of is None else f"{of['median']:.2f}, {figure(of['at_most'], '{:.2f}', 'unresolved')}" for of in ratios]
        rows.append(row)
    return columns(rows)
