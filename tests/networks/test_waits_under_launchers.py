"""Ranks that wait, started by horovodrun and by torchrun, with the times that the documentation names."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import lonely_worker
import pytest
import ranks

pytestmark = pytest.mark.long

LAUNCHERS = {"horovodrun": ["-np", "2", sys.executable], "torchrun": ["--standalone", "--nproc-per-node", "2"]}
both_launchers = pytest.mark.parametrize("launcher", LAUNCHERS)


def found(launcher: str, case: str) -> tuple[list[dict[str, Any]], str]:
    """Return what both ranks report, and the output of the command."""
    program = [str(Path(sys.executable).parent / launcher), *LAUNCHERS[launcher], "-m", "lonely_worker"]
    with tempfile.TemporaryDirectory() as folder:
        running = subprocess.Popen(
            [*program, folder, case],
            env=ranks._environment(""),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = running.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            raise AssertionError(f"{launcher} does not end: {running.communicate()[0]}") from None
        files = [Path(folder) / f"{rank}.json" for rank in range(2)]
        assert all(file.exists() for file in files), output
        return [json.loads(file.read_text()) for file in files], output


@both_launchers
def test_a_rank_that_waits_ten_seconds_says_for_whom_and_goes_on(launcher: str) -> None:
    (zero, one), output = found(launcher, "late")
    assert zero["said"] == one["said"] == "nothing was raised", output
    assert lonely_worker.LATE <= zero["seconds"] < lonely_worker.LATE + 5
    said = re.findall(
        r"rank 0 has waited (\d+) s, since \d\d:\d\d:\d\d, in bucket \d+, request \d+ for rank 1; rank 1 may", output
    )
    assert said == ["10"], output


@both_launchers
def test_a_rank_that_waits_for_a_failed_one_raises_its_error_after_ten_seconds(launcher: str) -> None:
    (zero, one), output = found(launcher, "fails")
    assert one["said"] != "nothing was raised" and one["seconds"] < 5, output
    assert "rank 1 cannot go on (failed in a step: " in zero["said"], output
    assert 9.5 <= zero["seconds"] < 15, zero


@both_launchers
def test_one_rank_that_changes_alone_ends_with_an_error_after_thirty_seconds(launcher: str) -> None:
    (zero, one), output = found(launcher, "changes")
    assert any("are for all ranks at the same step" in each["said"] for each in (zero, one)), output
    assert all(29 <= each["seconds"] < 45 for each in (zero, one)), (zero, one)
    assert re.search(r"rank 1 has waited 10 s, since [\d:]*, in the meeting that all ranks call", output), output
