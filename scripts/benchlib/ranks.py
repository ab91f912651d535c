"""Programs that run as ranks and report to this one: starting them, passing their progress on, taking their result."""

from __future__ import annotations

import collections
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchlib import report
from benchlib.machine import ROOT

PROGRESS, RESULT = "@progress ", "@result "
"""How lines of rank 0 begin that are meant for this program."""


class RanksFailed(RuntimeError):
    """The ranks did not come to their end."""


def on_cluster(hosts: int, rate: str, job: Sequence[str]) -> list[str]:
    """The command that runs a job as one rank on each of so many emulated hosts."""
    options = ["--hosts", str(hosts), "--rate", rate, "--output", "0"]
    return [sys.executable, str(ROOT / "scripts" / "cluster"), *options, "--", *job]


def listen(lines: Iterable[str], progress: report.Progress, label: str) -> tuple[dict[str, Any] | None, list[str]]:
    """The result, and the last lines that were neither result nor progress."""
    result = None
    rest: collections.deque[str] = collections.deque(maxlen=25)
    for line in lines:
        if RESULT in line:
            result = json.loads(line.partition(RESULT)[2])
        elif PROGRESS in line:
            progress(f"{label}: {line.partition(PROGRESS)[2].strip()}")
        else:
            rest.append(line)
    progress.end()
    return result, list(rest)


def run(command: Sequence[str], environment: Mapping[str, str], launcher: str, label: str) -> dict[str, Any]:
    """What rank 0 reports."""
    try:
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
    except OSError as error:
        raise RanksFailed(f"the ranks could not be started: {error}; run scripts/setup first") from None
    with process:
        assert process.stdout is not None
        try:
            result, rest = listen(process.stdout, report.Progress(), label)
            status = process.wait()
        except BaseException:
            process.terminate()
            raise
    if status == 0 and result is not None:
        return result
    sys.stderr.writelines(rest)
    raise RanksFailed(f"the ranks did not come to their end ({launcher} ended with {status}); see above")
