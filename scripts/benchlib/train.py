"""`bench.py train` on the near side: launches the ranks of scripts/train_job.py, makes the table."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchlib import ranks, report
from benchlib.machine import ROOT
from benchlib.rounds import Spread

KEEPS_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 36), "MALLOC_MMAP_MAX_": "0"}
"""Whether glibc gives gradients back to the system in every step, which costs a step some 10 ms of page faults, hangs on the
order in which a spec frees them, and those above 32 MB it gives back in any order. Here no spec does."""


class Launch(NamedTuple):
    """What is launched: on how many hosts with which links, and what each of their ranks measures."""

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
    options = {name: getattr(launch, name) for name in ("rounds", "steps", "width", "batch", "momentum", "turn")}
    job = [sys.executable, str(ROOT / "scripts" / "train_job.py")]
    job += [f"--{name}={value}" for name, value in options.items()] + list(launch.specs)
    if launch.launcher == "cluster":
        return ranks.on_cluster(launch.hosts, launch.rate, job)
    return [str(Path(sys.executable).parent / "horovodrun"), "-np", str(launch.hosts), *job]


def perform(launch: Launch, where: str) -> dict[str, Any]:
    """Runs the ranks, and sums up what they measured; `where` begins every line of progress."""
    threads = str(max(1, len(os.sched_getaffinity(0)) // launch.hosts))
    environment = {**KEEPS_MEMORY, **os.environ, "PYTHONUNBUFFERED": "1"}
    if launch.launcher == "horovodrun":
        environment.setdefault("OMP_NUM_THREADS", threads)
    return summary(ranks.run(command(launch), environment, launch.launcher, where))


def summary(raw: dict[str, Any]) -> dict[str, Any]:
    """Medians and spreads of what train_job.py reports. A ratio to none is taken within each round."""
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
    rows = [("", "ms a step", "min..max", "x none", "of rounds", "bytes a step", "compression")]
    for line in run["lines"]:
        ms, to_none = line["ms"], line["ratio_to_none"]
        rows.append(
            (
                line["spec"],
                f"{ms['median']:.0f}",
                f"{ms['low']:.0f}..{ms['high']:.0f}",
                f"{to_none['median']:.2f}" if to_none else "-",
                f"{to_none['low']:.2f}..{to_none['high']:.2f}" if to_none else "-",
                f"{line['bytes_per_step']:,}",
                f"{line['compression']:.0f} x" if line["compression"] else "-",
            )
        )
    return report.table(rows)
