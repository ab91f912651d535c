"""A launch of train/job.py on real ranks: its command, and the summary of its times."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from laboratory import ranks
from laboratory.report.tables import columns, figure
from laboratory.stats import median_bound
from laboratory.tasks import prepared
from laboratory.tasks.task import Settings
from laboratory.timing import Spread
from laboratory.train.ways import HOROVOD, environment

# The ways that a user has without gradcomp, and that no way should be slower than.
RIVALS = ("stock", "bf16")
# The rounds that a way is compared in.
PARTS = {"over": "", "over_before": ", before the change", "over_after": ", after it"}


# The rounds of a launch whose links change, at least: two before the change, one with it, and two after it.
FEWEST = 5


class Launch(NamedTuple):
    """Everything that decides a launch: the ranks, their links, and the measurement.

    turn: seconds of a way in a round. later: the rate that the links get after so many seconds, if they change.
    data: the name of the prepared file, if the task has one.
    """

    launcher: str
    hosts: int
    rate: str
    task: str
    settings: Settings
    ways: Sequence[str]
    rounds: int
    steps: int
    turn: float = 1e9
    door: str = HOROVOD
    later: tuple[str, float] | None = None
    data: str = ""

    def key(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {**self._asdict(), "settings": self.settings.key()}


def command(launch: Launch, folder: Path | None = None) -> list[str]:
    """Write the launch's command. folder: of prepared data."""
    words = [f"--{name}={getattr(launch, name)}" for name in ("door", "task", "rounds", "steps", "turn")]
    words.append(f"--settings={json.dumps(launch.settings._asdict())}")
    if launch.data and folder is not None:
        words.append(f"--data={prepared.place(folder, launch.data)}")
    later = ["--later", "{}:{:g}".format(*launch.later)] if launch.later else []
    job = ["laboratory.train.job", *words, *launch.ways]
    return ranks.command(launch.launcher, launch.hosts, job, launch.rate, launch.door, later)


def perform(launch: Launch, label: str, folder: Path | None = None, projects: Path | None = None) -> dict[str, Any]:
    """Run the ranks and summarise their times. `label` begins each line of progress. folder: of prepared data."""
    variables = ranks.environment(launch.hosts, **environment(projects))
    return summary(ranks.run(command(launch, folder), variables, label), launch.later is not None)


def summary(raw: Mapping[str, Any], changes: bool = False) -> dict[str, Any]:
    """Return medians and ranges of the job's times. Ratios to other ways are taken within rounds.

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
            "ratio_to_none": None,
            "loss": each["loss"],
        }
        if "none" in medians:
            line["ratio_to_none"] = Spread.of([a / b for a, b in zip(medians[way], medians["none"], strict=True)])._asdict()
        rivals = [rival for rival in RIVALS if rival in means and rival != way]
        line |= {part: {rival: over(means[way][of], means[rival][of]) for rival in rivals} for part, of in parts.items()}
        line |= {name: each[name] for name in ("auto",) if name in each}
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
    return {"median": statistics.median(ratios), "at_most": median_bound(ratios)}


def table(run: Mapping[str, Any]) -> str:
    """Write a launch's table."""
    rivals = [rival for rival in RIVALS if any(rival in line["over"] for line in run["lines"])]
    parts = {part: said for part, said in PARTS.items() if any(part in line for line in run["lines"])}
    heading = ["", "ms a step", "min..max", "x none", "of rounds", "bytes a step", "compression"]
    compared = [f"x {rival}, at most{said}" for said in parts.values() for rival in rivals]
    rows = [[*heading, *compared]]
    for line in run["lines"]:
        ms, ratio = line["ms"], line["ratio_to_none"]
        row = [
            line["way"],
            f"{ms['median']:.0f}",
            f"{ms['low']:.0f}..{ms['high']:.0f}",
            f"{ratio['median']:.2f}" if ratio else "-",
            f"{ratio['low']:.2f}..{ratio['high']:.2f}" if ratio else "-",
            figure(line["bytes_per_step"], "{:,}"),
            figure(line["compression"], "{:.0f} x"),
        ]
        row += [_over(line[part].get(rival)) for part in parts for rival in rivals]
        rows.append(row)
    return columns(rows)


def _over(found: Mapping[str, float | None] | None) -> str:
    return "-" if found is None else f"{found['median']:.2f}, {figure(found['at_most'], '{:.2f}', 'unresolved')}"
