"""`bench.py train` on the near side: launches the ranks of scripts/train_job.py, makes the table."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from benchlib import ranks, report
from benchlib.machine import ROOT
from benchlib.rounds import Spread

KEEPS_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 32), "MALLOC_MMAP_THRESHOLD_": str(1 << 25)}
"""Whether glibc gives gradients back to the system in every step, which costs a step some 10 ms of page faults, hangs on the
order in which a spec frees them. Here no spec does."""


def command(chosen: argparse.Namespace, rate: str) -> list[str]:
    job = [sys.executable, str(ROOT / "scripts" / "train_job.py"), "--rounds", str(chosen.rounds), "--steps", str(chosen.steps)]
    job += ["--width", str(chosen.width), *chosen.specs]
    if chosen.launcher == "cluster":
        return ranks.on_cluster(chosen.hosts, rate, job)
    return [str(Path(sys.executable).parent / "horovodrun"), "-np", str(chosen.hosts), *job]


def launch(chosen: argparse.Namespace, rate: str) -> dict[str, Any] | None:
    """Runs the ranks; None, with the reason on stderr, if they failed."""
    threads = str(max(1, len(os.sched_getaffinity(0)) // chosen.hosts))
    environment = {**KEEPS_MEMORY, **os.environ, "PYTHONUNBUFFERED": "1"}
    if chosen.launcher == "horovodrun":
        environment.setdefault("OMP_NUM_THREADS", threads)
    result = ranks.run(command(chosen, rate), environment, chosen.launcher, rate)
    return None if result is None else summary(result)


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
