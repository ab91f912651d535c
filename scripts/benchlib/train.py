"""`bench.py train` on the near side: launches the ranks of scripts/train_job.py, passes their progress on, makes the table."""

from __future__ import annotations

import argparse
import collections
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchlib import report
from benchlib.machine import ROOT
from benchlib.rounds import Spread

KEEPS_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 32), "MALLOC_MMAP_THRESHOLD_": str(1 << 25)}
"""Whether glibc gives gradients back to the system in every step, which costs a step some 10 ms of page faults, hangs on the
order in which a spec frees them. Here no spec does."""

PROGRESS, RESULT = "@progress ", "@result "
"""How lines of rank 0 begin that are meant for this program."""


def command(chosen: argparse.Namespace, rate: str) -> list[str]:
    job = [sys.executable, str(ROOT / "scripts" / "train_job.py"), "--rounds", str(chosen.rounds), "--steps", str(chosen.steps)]
    job += ["--width", str(chosen.width), *chosen.specs]
    if chosen.launcher == "cluster":
        cluster = [sys.executable, str(ROOT / "scripts" / "cluster"), "--hosts", str(chosen.hosts), "--rate", rate]
        return [*cluster, "--output", "0", "--", *job]
    return [str(Path(sys.executable).parent / "horovodrun"), "-np", str(chosen.hosts), *job]


def listen(lines: Iterable[str], progress: report.Progress, rate: str) -> tuple[dict[str, Any] | None, list[str]]:
    """The result, and the last lines that were neither result nor progress."""
    result = None
    rest: collections.deque[str] = collections.deque(maxlen=25)
    for line in lines:
        if RESULT in line:
            result = json.loads(line.partition(RESULT)[2])
        elif PROGRESS in line:
            progress(f"{rate}: {line.partition(PROGRESS)[2].strip()}")
        else:
            rest.append(line)
    progress.end()
    return result, list(rest)


def launch(chosen: argparse.Namespace, rate: str) -> dict[str, Any] | None:
    """Runs the ranks; None, with the reason on stderr, if they failed."""
    threads = str(max(1, len(os.sched_getaffinity(0)) // chosen.hosts))
    environment = {**KEEPS_MEMORY, **os.environ, "PYTHONUNBUFFERED": "1"}
    if chosen.launcher == "horovodrun":
        environment.setdefault("OMP_NUM_THREADS", threads)
    started = command(chosen, rate)
    try:
        process = subprocess.Popen(
            started, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
    except OSError as error:
        print(f"bench.py: the ranks could not be started: {error}; run scripts/setup first", file=sys.stderr)
        return None
    with process:
        assert process.stdout is not None
        try:
            result, rest = listen(process.stdout, report.Progress(), rate)
            status = process.wait()
        except BaseException:
            process.terminate()
            raise
    if status == 0 and result is not None:
        return summary(result)
    sys.stderr.writelines(rest)
    launcher = shlex.join([Path(started[1 if chosen.launcher == "cluster" else 0]).name])
    print(f"bench.py: the ranks did not come to their end ({launcher} ended with {status}); see above", file=sys.stderr)
    return None


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
