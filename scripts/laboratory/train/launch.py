"""A launch of train/job.py on real ranks: its command, and the summary of its times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from laboratory import ranks
from laboratory.report.tables import columns, figure
from laboratory.timing import Spread


class Launch(NamedTuple):
    """Everything that decides a launch: the ranks, their links, and the measurement.

    turn: seconds of a spec in a round. momentum: the optimizer's, for specs without a momentum of their own.
    """

    launcher: str
    hosts: int
    rate: str
    width: int
    specs: Sequence[str]
    rounds: int
    steps: int
    batch: int = 64
    momentum: float = 0.0
    turn: float = 1e9


def command(launch: Launch) -> list[str]:
    """Write the launch's command."""
    options = [f"--{name}={getattr(launch, name)}" for name in ("rounds", "steps", "width", "batch", "momentum", "turn")]
    return ranks.command(launch.launcher, launch.hosts, ["laboratory.train.job", *options, *launch.specs], launch.rate)


def perform(launch: Launch, label: str) -> dict[str, Any]:
    """Run the ranks and summarise their times. `label` begins each line of progress."""
    return summary(ranks.run(command(launch), ranks.environment(launch.hosts), label))


def summary(raw: dict[str, Any]) -> dict[str, Any]:
    """Return medians and ranges of the job's times. Ratios to none are taken within rounds."""
    medians = {spec: [Spread.of(steps).median for steps in each["rounds"]] for spec, each in raw["specs"].items()}
    lines = []
    for spec, each in raw["specs"].items():
        steps = Spread.of([second for steps in each["rounds"] for second in steps])
        line: dict[str, Any] = {
            "spec": spec,
            "ms": {key: 1000 * value for key, value in steps._asdict().items()},
            "ms_of_rounds": [1000 * median for median in medians[spec]],
            "bytes_per_step": each["bytes"],
            "compression": raw["bytes_dense"] / each["bytes"] if each["bytes"] else None,
            "ratio_to_none": None,
            "loss": each["loss"],
        }
        if "none" in medians:
            line["ratio_to_none"] = Spread.of([a / b for a, b in zip(medians[spec], medians["none"], strict=True)])._asdict()
        lines.append(line)
    return {"ranks": raw["ranks"], "parameters": raw["parameters"], "batch": raw["batch"], "lines": lines}


def table(run: dict[str, Any]) -> str:
    """Write a launch's table."""
    rows = [("", "ms a step", "min..max", "x none", "of rounds", "bytes a step", "compression")]
    for line in run["lines"]:
        ms, ratio = line["ms"], line["ratio_to_none"]
        rows.append(
            (
                line["spec"],
                f"{ms['median']:.0f}",
                f"{ms['low']:.0f}..{ms['high']:.0f}",
                f"{ratio['median']:.2f}" if ratio else "-",
                f"{ratio['low']:.2f}..{ratio['high']:.2f}" if ratio else "-",
                f"{line['bytes_per_step']:,}",
                figure(line["compression"], "{:.0f} x"),
            )
        )
    return columns(rows)
