"""Runs of the emulated cluster, and what its ranks say."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = [sys.executable, str(ROOT / "scripts" / "cluster")]
TOOLS = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
LACKING = [tool for tool in ("ip", "tc") if not shutil.which(tool, path=TOOLS)]
MARKS = [
    pytest.mark.skipif(os.geteuid() != 0, reason="the emulated cluster was NOT tested: it needs root"),
    pytest.mark.skipif(bool(LACKING), reason=f"the emulated cluster was NOT tested: {LACKING} missing, install iproute2"),
]


def program(name: str, *arguments: str) -> list[str]:
    return [sys.executable, f"{ROOT}/tests/scripts/programs/cluster_{name}.py", *arguments]


def cluster(options: str, command: list[str], path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": path or os.environ["PATH"]}
    whole = [*CLUSTER, *options.split(), "--", *command]
    return subprocess.run(whole, capture_output=True, text=True, timeout=50, env=environment)


def lines(done: subprocess.CompletedProcess[str], count: int) -> dict[int, list[str]]:
    """What each rank said, once all went well."""
    assert done.returncode == 0, done.stderr
    said: dict[int, list[str]] = {rank: [] for rank in range(count)}
    for line in done.stdout.splitlines():
        mark, _, rest = line.partition(" ")
        said[int(mark.strip("[]"))].append(rest)
    return said


def need_cluster() -> None:
    """Skip the test where the emulated cluster cannot run."""
    if os.geteuid() != 0 or LACKING:
        pytest.skip("the laboratory on emulated hosts was NOT tested: it needs root and iproute2")
