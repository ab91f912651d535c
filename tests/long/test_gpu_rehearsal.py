"""scripts/gpu_check with the Python and torch of a GPU machine, where no GPU is: prepared, and then run on the CPU.

It fetches 3 GB, takes 8 GB of disk and half an hour of two cores, and keeps its environment in build/gpu-prepare.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from laboratory.gpu import packing, stages, work

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
def test_a_prepared_check_runs_with_the_versions_of_a_gpu_machine(tmp_path: Path) -> None:
    try:
        packing.interpreter()
    except stages.Impossible as error:
        pytest.skip(f"gpu_check was NOT rehearsed: {error}")
    done = subprocess.run([sys.executable, "scripts/gpu_check", "--prepare"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    packed = stages.prepared()["packed"]
    python = packing.VENV / "bin" / "python"
    environment = {**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}", "PYTHONPATH": ""}
    command = [python, "scripts/gpu_check", "--dry-run", "--out", tmp_path]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, env=environment)
    without_horovod = {} if "horovod" in packed else {"horovod-ranks": "failed"}
    for call in work.CALLS:
        result = json.loads((tmp_path / f"dry-run-{call}.json").read_text())
        wrong = {each["name"]: each["status"] for each in result["stages"] if each["status"] != "ok"}
        assert wrong == (without_horovod if call == "tests" else {}), done.stdout
        assert result["versions"]["torch"].startswith(packing.TORCH) and result["versions"]["python"].startswith(packing.PYTHON)
        assert result["stages"][1]["figures"]["prepared"] == packed, done.stdout
