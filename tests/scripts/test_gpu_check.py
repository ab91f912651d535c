"""The GPU check where there is no GPU: its calls, limits, files and refusals, and its readings of CUDA's tools."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from laboratory import machine, options
from laboratory.gpu import local_steps, stages, training, work
from laboratory.gpu.stages import Clock, Failed, Gpu, Impossible, Output, Record, Stage

ROOT = Path(__file__).resolve().parents[2]
PYTHON = sys.executable
GPU = Gpu("NVIDIA H200", "580.1", "9.0", "1 MiB")
CALLS = ("tests", "prices", "links", "kernels", "steps")


def gpu_check(*options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command, environment = [PYTHON, "scripts/gpu_check", *options], {**os.environ, **variables}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, env=environment)


def run_all(folder: Path, *chosen: Stage, total: float = 30, after: Callable[[list[Record]], object] = len) -> list[Record]:
    return stages.run([[stage] for stage in chosen], total, folder / "log", {}, after)


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


def names(call: str, gpu: Gpu | None) -> list[str]:
    return [stage.name for group in work.stages(call, gpu) for stage in group]


def test_each_call_fits_into_its_seconds() -> None:
    """Limits add up to the call's own with a prepared extension. Where it must be built, the total ends the last stages."""
    assert tuple(work.CALLS) == CALLS and work.SITTING <= 15 * 60
    for call, limit in work.CALLS.items():
        assert work.total(call) + 2 * stages.ENDING <= limit
        groups = work.stages(call, GPU)
        longest = [max(stage.limit for stage in group) for group in groups if group[0].name != "build"]
        assert sum(longest) <= work.total(call), (call, sum(longest))
        assert [stage.name for group in groups for stage in group if stage.required] == ["machine", "build"]
        assert len(set(names(call, GPU))) == len(names(call, GPU))


def test_a_dry_run_has_the_stages_of_every_call_but_those_of_a_gpus_tools() -> None:
    left_out = {call: {*names(call, GPU)} - {*names(call, None)} for call in CALLS}
    of_tools = {f"times-{size}" for size in work.SIZES} | {*work.TOOLS}
    assert left_out == {call: of_tools if call == "kernels" else set() for call in CALLS}


def test_stages_of_a_group_run_side_by_side_each_with_its_log(tmp_path: Path) -> None:
    """Each waits for the file that the other one makes. A stage that fails costs only itself."""
    meet = f"touch {tmp_path}/$0; until [ -e {tmp_path}/$1 ]; do sleep 0.05; done; echo met $1"
    group = [
        Stage(own, lambda clock, own=own, other=other: {"said": [clock.command(["sh", "-c", meet, own, other])]}, 20)  # type: ignore[misc]
        for own, other in (("a", "b"), ("b", "a"))
    ]
    seen: list[list[str]] = []
    broken = Stage("broken", raises(Failed("bad")).run, 5, required=True)
    chosen = [[*group, broken], [Stage("later", lambda clock: {}, 5)]]
    records = stages.run(chosen, 40, tmp_path / "log", {}, lambda now: seen.append([each["status"] for each in now]))
    assert {each["name"]: each["status"] for each in records} == {
        "broken": "failed",
        "a": "ok",
        "b": "ok",
        "later": "impossible",
    }
    assert seen[:2] == [["running"] * 3, ["running", "running", "failed"]]
    log = (tmp_path / "log").read_text()
    assert "=== a\n$ sh" in log and "met b\n" in log and "=== b\n$ sh" in log
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "log"]


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
        stages.run([[stage] for stage in chosen], 20, output.log, {}, output.write)
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


def test_an_interrupted_stage_ends_those_beside_it(tmp_path: Path) -> None:
    began, later = time.monotonic(), lambda clock: time.sleep(3) or interrupted(clock)
    with pytest.raises(KeyboardInterrupt):
        stages.run([[Stage("slow", hanging, 50), Stage("ended", later, 50)]], 50, tmp_path / "log", {}, len)
    assert time.monotonic() - began < 40
    assert "=== slow\n$ sh" in (tmp_path / "log").read_text()


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


def test_a_call_has_a_name_and_only_the_pack_takes_data() -> None:
    done = gpu_check("tests", "step")
    assert done.returncode == 2 and "invalid choice: 'step'" in done.stderr
    done = gpu_check("steps", "--data", "folder")
    assert done.returncode == 2 and "--data is packed by --prepare" in done.stderr


def test_a_sitting_makes_calls_in_turn_and_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def one(call: str, gpu: Gpu | None) -> list[list[Stage]]:
        return [[Stage(call, lambda clock: {"left": clock.left(), "said": [clock.command(["sleep", "0.2"])]}, 500)]]

    monkeypatch.setattr(work, "stages", one)
    monkeypatch.setattr(work, "environment", dict)
    monkeypatch.setenv("PATH", os.environ["PATH"])  # a sitting adds to it
    records = work.sitting(CALLS, GPU, tmp_path, within=100)
    lefts = [record["figures"]["left"] for record in records]
    assert [record["name"] for record in records] == [*CALLS] and work.CALLS["prices"] == 90
    assert lefts[1] == pytest.approx(80, abs=1) and 90 < lefts[4] < lefts[3] < lefts[2] < lefts[0] <= 100
    assert sorted(path.stem for path in tmp_path.glob("*.json")) == sorted(f"gpu-nvidia-h200-{call}" for call in CALLS)
    (record,) = work.sitting(["steps"], GPU, tmp_path, within=0)
    assert record["status"] == "failed" and "no time was left for sleep" in record["reason"]


def test_a_machine_without_torch_ends_every_stage_within_seconds(tmp_path: Path) -> None:
    """A Python that has neither torch nor the extension starts gpu_check, and is told what it lacks."""
    out = tmp_path / "out"
    command = [PYTHON, "-S", str(ROOT / "scripts" / "gpu_check"), "tests", "--dry-run", "--out", str(out)]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={"PATH": os.environ["PATH"]})
    assert time.monotonic() - began < 30
    assert done.returncode == 1
    assert "missing: torch, numpy" in done.stdout
    found = json.loads((out / "dry-run-tests.json").read_text())["stages"]
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


def test_initcheck_leaves_out_torchs_copies_and_watches_all_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(tmp_path / "compute-sanitizer", """echo "--kernel-name x"; printf '@{"asked": "%s"}\\n' "$*" """)
    monkeypatch.setattr(work, "BUILD", tmp_path)
    monkeypatch.setattr(work, "program", lambda name: str(tmp_path / name))
    asked = {}
    for tool in ("initcheck", "memcheck"):
        (record,) = run_all(tmp_path, Stage(tool, partial(work.sanitized, tool=tool, each=1), 30))
        asked[tool] = record["figures"]["asked"]
    assert "--check-api-memory-access no" in asked["initcheck"] and "gradcomp " not in asked["initcheck"]
    assert "--kernel-name kernel_substring=gradcomp" in asked["memcheck"]


def test_a_training_without_its_data_says_how_to_pack_them(tmp_path: Path) -> None:
    stage = Stage(
        "training", partial(work.trained, device="cuda", module="training", parts="trainings", data=tmp_path / "x.npz"), 5
    )
    (record,) = run_all(tmp_path, stage)
    assert record["status"] == "impossible"
    assert record["reason"] == "no x.npz was packed: scripts/gpu_check --prepare --data FOLDER packs it"


def test_the_toolkit_is_the_one_that_nvcc_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvcc on PATH may be a script far from the toolkit."""
    home = tmp_path / "cuda-13"
    (home / "bin").mkdir(parents=True)
    fake(tmp_path / "nvcc", f"echo '#$ _SPACE_= '>&2; echo '#$ TOP={home}/bin/..' >&2")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = stages.environment()
    assert found["CUDA_HOME"] == str(home) and found["CUDACXX"] == f"{home}/bin/nvcc"
    assert found["PATH"].endswith(f"{home}/bin")


@pytest.mark.parametrize("size", work.SIZES)
def test_lab_kernels_takes_the_names_of_all_sizes(size: str) -> None:
    assert options.name(machine.slug(f"check-{size}"))


# Stages of a dry run: one of each kind; and, in a minute, the others.
FEW, OTHERS = ("ddp", "counters-sparse", "local-steps", "training"), ("horovod-ranks", "doors", "calls", "gpt")


@pytest.mark.slow
@pytest.mark.parametrize("wanted", [FEW, pytest.param(OTHERS, marks=pytest.mark.long)], ids=["few", "others"])
def test_a_dry_run_holds(wanted: tuple[str, ...], tmp_path: Path) -> None:
    """But for its build, which takes minutes: the package that is installed stands for it."""
    stages.BUILD.mkdir(parents=True, exist_ok=True)
    output = Output(tmp_path, "tests", None)
    first, *others = [group for call in CALLS for group in work.stages(call, None) if group[0].name != "build"]
    chosen = [[stage for stage in group if stage.name in wanted] for group in others]
    records = stages.run([first, *filter(None, chosen)], 400, output.log, stages.environment(), output.write)
    assert {record["name"]: record["status"] for record in records} == dict.fromkeys(("machine", *wanted), "ok"), records
    by_name = {record["name"]: record.get("figures", {}) for record in records}
    assert all(all(by_name[name]["checks"].values()) for name in {"ddp", "horovod-ranks", "doors"} & {*wanted})
    if "gpt" in wanted:
        assert {way["way"] for way in by_name["gpt"]["ways"]} >= {"ddp", "psgd1", "dense", "topk", "orq"}
    else:
        trainings, of_local = by_name["training"]["trainings"], by_name["local-steps"]["trainings"]
        assert [(one["spec"], one["seed"]) for one in trainings] == [(spec, seed) for seed in (1, 2) for spec in training.SPECS]
        assert all(one["steps"] == 2 and 0 <= one["accuracy"] <= 100 and one["compression"] >= 1 for one in trainings)
        plan = local_steps.PLANS["cpu"]
        assert [(one["way"], one["ranks"]) for one in of_local] == [(plan.way, plan.ranks), ("stock", 1)] * len(plan.sizes)
        assert [one["batch"] for one in of_local] == [2, 4] * len(plan.sizes)  # DDP's one rank has the batches of all
        assert all(one["steps"] % plan.every == 0 and 1 < one["perplexity"] < 256 for one in of_local)
        assert [one["compression"] for one in of_local] == [plan.every, 1] * len(plan.sizes)
    result = json.loads((tmp_path / "dry-run-tests.json").read_text())
    assert result["device"]["name"].startswith("none") and result["versions"]["torch"]
