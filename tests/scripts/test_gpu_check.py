"""The GPU check where there is no GPU: its calls, limits, files and refusals, and its readings of CUDA's tools."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from laboratory.gpu import stages, work
from laboratory.gpu.stages import Clock, Failed, Gpu, Impossible, Output, Record, Stage

ROOT = Path(__file__).resolve().parents[2]
PYTHON = sys.executable
GPU = Gpu("NVIDIA H200", "580.1", "9.0", "1 MiB")
NINE_MINUTES = 540


def gpu_check(*options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command, environment = [PYTHON, "scripts/gpu_check", *options], {**os.environ, **variables}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, env=environment)


def run_all(folder: Path, *chosen: Stage, total: float = 30, after: Callable[[list[Record]], object] = len) -> list[Record]:
    return stages.run(chosen, total, folder / "log", {}, after)


def raises(error: Exception) -> Stage:
    def run(clock: Clock) -> Record:
        raise error

    return Stage(type(error).__name__, run, 5)


def ended(stat: Path) -> bool:
    """Return whether a process is gone, or has ended and waits for its parent to notice."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def fake(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_every_stage_has_its_turn_and_its_reason(tmp_path: Path) -> None:
    fine = Stage("fine", lambda clock: {"figure": 1}, 5)
    records = run_all(tmp_path, *map(raises, (Failed("bad"), Impossible("no nvcc"), KeyError("odd"))), fine)
    assert [record["status"] for record in records] == ["failed", "impossible", "failed", "ok"]
    assert [record.get("reason") for record in records[:3]] == ["bad", "no nvcc", "KeyError: 'odd'"]
    assert records[3]["figures"] == {"figure": 1}


def test_no_stage_runs_after_a_required_one_failed(tmp_path: Path) -> None:
    broken = Stage("build", raises(Failed("it broke")).run, 5, required=True)
    records = run_all(tmp_path, broken, Stage("tests", lambda clock: {}, 5))
    assert records[1]["status"] == "impossible" and records[1]["reason"].startswith("it needs the stage build")


def test_a_command_is_ended_at_its_limit_with_all_it_started(tmp_path: Path) -> None:
    marker = tmp_path / "child"
    program = f"echo begun; sleep 60 & echo $! > {marker}; wait"
    began = time.monotonic()
    (record,) = run_all(tmp_path, Stage("slow", lambda clock: {"said": clock.command(["sh", "-c", program])}, 2))
    assert record["status"] == "failed"
    assert record["reason"].splitlines() == ["sh was ended at the stage's limit", "begun"]
    assert time.monotonic() - began < 40
    child = Path("/proc") / marker.read_text().strip() / "stat"
    end = time.monotonic() + 10
    while not ended(child) and time.monotonic() < end:
        time.sleep(0.05)
    assert ended(child)


def test_no_call_can_take_nine_minutes() -> None:
    """The stages' limits are above it in sum, since few stages take long: the total is what ends a call."""
    assert work.TOTAL + 2 * stages.ENDING <= NINE_MINUTES
    for call in work.CALLS:
        every = work.stages(call, GPU)
        assert all(stage.limit < work.TOTAL / 2 for stage in every)
        assert [stage.name for stage in every if stage.required][:2] == ["machine", "build"]
        assert len({stage.name for stage in every}) == len(every)


def test_a_dry_run_has_the_stages_of_every_call_but_those_of_a_gpus_tools() -> None:
    left_out = {call: {stage.name for stage in work.stages(call, GPU)} for call in work.CALLS}
    for call, names in left_out.items():
        names -= {stage.name for stage in work.stages(call, None)}
    assert left_out == {"kernels": set(), "ranks": set(), "tools": set(work.TOOLS)}


def failing(clock: Clock) -> Record:
    clock.command(["echo", "said"])
    raise Failed(f"cc: {ROOT}/csrc/ops.h: no")


def hanging(clock: Clock) -> Record:
    clock.command(["sh", "-c", "echo begun; sleep 60"])
    return {}


def interrupted(clock: Clock) -> Record:
    raise KeyboardInterrupt


def test_a_call_leaves_its_results_in_two_files_however_its_stages_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = Output(tmp_path, "kernels", GPU)
    chosen = [
        Stage("first", lambda clock: {"figure": 1}, 5),
        Stage("bad", failing, 5),
        Stage("slow", hanging, 1),
        Stage("last", lambda clock: {"figure": 2}, 5),
        Stage("ended", interrupted, 5),
    ]
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        stages.run(chosen, 20, output.log, {}, output.write)
    assert time.monotonic() - began < 15
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu-nvidia-h200-kernels.json", "gpu-nvidia-h200-kernels.log"]
    result = json.loads(output.result.read_text())
    assert [each["status"] for each in result["stages"]] == ["ok", "failed", "failed", "ok", "running"]
    assert result["stages"][3]["figures"] == {"figure": 2}
    assert result["stages"][1]["reason"] == "cc: ./csrc/ops.h: no"  # no path of the machine
    assert (result["call"], result["device"]["name"]) == ("kernels", "NVIDIA H200")
    assert {"date", "commit", "machine", "command", "versions"} <= result.keys()
    log = output.log.read_text()
    assert "=== bad\n$ echo said\nsaid" in log and "begun" in log
    assert "csrc/ops.h: no" in capsys.readouterr().out


def test_a_gpu_is_read_from_nvidia_smi(tmp_path: Path) -> None:
    smi = tmp_path / "nvidia-smi"
    fake(smi, "echo 'NVIDIA H200, 580.1, 9.0, 143771 MiB'")
    found = stages.find_gpu(str(smi))
    assert found == Gpu("NVIDIA H200", "580.1", "9.0", "143771 MiB") and found.arch == "90"
    fake(smi, "echo 'No devices were found'")
    assert stages.find_gpu(str(smi)) is None and stages.find_gpu(str(tmp_path / "absent")) is None


def test_without_a_gpu_it_says_so_and_ends_with_2(tmp_path: Path) -> None:
    done = gpu_check("kernels", PATH=str(tmp_path))  # no nvidia-smi there, whatever this machine has
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "no GPU" in done.stderr


def test_a_call_must_be_named() -> None:
    done = gpu_check()
    assert done.returncode == 2 and "name a call: kernels, ranks, tools" in done.stderr


def test_a_machine_without_torch_ends_every_stage_within_seconds(tmp_path: Path) -> None:
    """A Python that has neither torch nor the extension starts gpu_check, and is told what it lacks."""
    out = tmp_path / "out"
    command = [PYTHON, "-S", str(ROOT / "scripts" / "gpu_check"), "ranks", "--dry-run", "--out", str(out)]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={"PATH": os.environ["PATH"]})
    assert time.monotonic() - began < 30
    assert done.returncode == 1
    assert "missing: torch, numpy" in done.stdout
    found = json.loads((out / "dry-run-ranks.json").read_text())["stages"]
    assert {each["status"] for each in found} == {"impossible"}
    assert "missing: torch" in found[0]["reason"] and "it needs the stage machine" in found[1]["reason"]


COUNTERS = """\
==PROF== Connected to process 1
==PROF== Profiling "spread_tiles": 0%....100% - 2 passes
"ID","Process ID","Kernel Name","Block Size","Grid Size","dram__bytes_read.sum","gpu__time_duration.sum"
"","","","","","byte","ns"
"0","1","void gradcomp::cuda::(anonymous namespace)::take<(int)3>(float *)","(256, 1, 1)","(64, 1, 1)","1,024","2048.5"
"1","1","gradcomp::cuda::<unnamed>::spread_tiles(const float *)","(256, 1, 1)","(1, 1, 1)","n/a","7"
"""


def test_ncus_table_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "table").write_text(COUNTERS)
    find_log = 'all="$*"; while [ "$1" != --log-file ]; do shift; done; log=$2'
    fake(tmp_path / "ncu", f'{find_log}; cp {tmp_path}/table "$log"; echo \'@{{"cases": ["a"]}}\'')
    monkeypatch.setattr(work, "BUILD", tmp_path)
    monkeypatch.setattr(work, "program", lambda name: str(tmp_path / name))
    stage = Stage("counters", lambda clock: work.counted(clock, "cuda", "passes", "1k"), 30)
    (record,) = run_all(tmp_path, stage)
    assert record["status"] == "ok", record
    assert record["figures"]["kernels"] == COUNTERS.splitlines()[2:]
    (tmp_path / "table").write_text("==ERROR== no permission\n")
    (record,) = run_all(tmp_path, stage)
    assert "ncu counted no kernel of gradcomp\n==ERROR== no permission" in record["reason"]


@pytest.mark.parametrize(
    "text,status,said",
    [
        ("echo '@{\"calls\": 2}'; echo '========= ERROR SUMMARY: 0 errors'", "ok", '"calls": 2'),
        ("echo '========= ERROR SUMMARY: 3 errors'; exit 99", "failed", "ERROR SUMMARY: 3 errors"),
        ("echo '========= Device not supported'; exit 1", "impossible", "refuses this GPU"),
    ],
)
def test_a_sanitizers_verdict_is_recorded(
    text: str, status: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(tmp_path / "compute-sanitizer", text)
    monkeypatch.setattr(work, "BUILD", tmp_path)
    monkeypatch.setattr(work, "program", lambda name: str(tmp_path / name))
    stage = Stage("memcheck", lambda clock: work.sanitized(clock, "memcheck", 1), 30)
    (record,) = run_all(tmp_path, stage)
    assert record["status"] == status and said in json.dumps(record)


@pytest.mark.slow
def test_a_dry_run_holds(tmp_path: Path) -> None:
    """But for its build, which takes minutes: the package that is installed stands for it."""
    stages.BUILD.mkdir(parents=True, exist_ok=True)
    output = Output(tmp_path, "ranks", None)
    wanted = ("machine", "ddp", "horovod-ranks"), ("calls", "counters-sparse")
    chosen = [
        stage
        for call, names in zip(("ranks", "tools"), wanted, strict=True)
        for stage in work.stages(call, None)
        if stage.name in names
    ]
    records = stages.run(chosen, 200, output.log, stages.environment(), output.write)
    assert [record["status"] for record in records] == ["ok"] * 5, records
    assert all(all(record["figures"]["checks"].values()) for record in records[1:3])
    result = json.loads((tmp_path / "dry-run-ranks.json").read_text())
    assert result["device"]["name"].startswith("none") and result["versions"]["torch"]
