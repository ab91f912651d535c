"""The three calls of gpu_check where there is no GPU: their limits, files and sentences, and what is read from CUDA's tools."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from laboratory.gpu import calls, gpu, needs, output, place, stages, tool_work, work
from laboratory.gpu.output import Output
from laboratory.gpu.stages import Clock, Failed, Record, Stage

ROOT = Path(__file__).resolve().parents[2]
PYTHON = sys.executable
GPU = gpu.Gpu("NVIDIA H200", "580.1", "9.0", "1 MiB")
NINE_MINUTES = 540


def gpu_check(*options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command, environment = [PYTHON, "scripts/gpu_check", *options], {**os.environ, **variables}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, env=environment)


def test_no_call_can_take_nine_minutes() -> None:
    """The stages' limits are above it in sum, since few stages take long: the total is what ends a call."""
    assert calls.TOTAL + 2 * stages.ENDING <= NINE_MINUTES
    for call in calls.CALLS:
        every = calls.stages(call, GPU)
        assert all(stage.limit < calls.TOTAL / 2 for stage in every)
        assert [stage.name for stage in every[:2]] == ["machine", "build"]
        names = [stage.name for stage in every]
        assert len(set(names)) == len(names)
        assert all(set(stage.needs) <= set(names[:i]) for i, stage in enumerate(every))


def test_a_dry_run_has_the_stages_of_every_call_but_those_of_a_gpus_tools() -> None:
    left_out = {call: {stage.name for stage in calls.stages(call, GPU)} for call in calls.CALLS}
    for call, names in left_out.items():
        names -= {stage.name for stage in calls.stages(call, None)}
    assert left_out == {"kernels": set(), "ranks": {"ddp-nccl", "nccl"}, "tools": set(calls.TOOLS)}


def failing(clock: Clock) -> Record:
    clock.command(["echo", "said"])
    raise Failed("it broke")


def hanging(clock: Clock) -> Record:
    clock.command(["sh", "-c", "echo begun; sleep 60"])
    return {}


def test_a_stage_that_fails_or_hangs_leaves_the_others_results_in_two_files(tmp_path: Path) -> None:
    out, logs, said = tmp_path / "out", tmp_path / "logs", list[str]()
    own = Output(out, "kernels", GPU, logs, lambda line: said.append(str(line)))
    chosen = [
        Stage("first", lambda clock: {"figure": 1}, 5),
        Stage("bad", failing, 5),
        Stage("slow", hanging, 1),
        Stage("last", lambda clock: {"figure": 2}, 5),
    ]
    began = time.monotonic()
    stages.run(chosen, 20, logs, {}, own.write)
    assert time.monotonic() - began < 15
    assert sorted(path.name for path in out.iterdir()) == ["gpu-nvidia-h200-kernels.json", "gpu-nvidia-h200-kernels.log"]
    result = json.loads(own.result.read_text())
    assert [each["status"] for each in result["stages"]] == ["ok", "failed", "timed out", "ok"]
    assert result["stages"][3]["figures"] == {"figure": 2}
    assert (result["call"], result["device"]["name"]) == ("kernels", "NVIDIA H200")
    assert {"date", "commit", "machine", "command", "versions"} <= result.keys()
    log = own.log.read_text()
    assert "=== bad: failed\n$ echo said\nsaid" in log and "begun" in log
    assert any("it broke" in line for line in said)


def test_a_call_that_is_ended_leaves_what_is_done_and_the_stage_under_way(tmp_path: Path) -> None:
    own = Output(tmp_path / "out", "kernels", GPU, tmp_path)

    def ended(clock: Clock) -> Record:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stages.run([Stage("first", lambda clock: {}, 5), Stage("second", ended, 5)], 20, tmp_path, {}, own.write)
    found = json.loads(own.result.read_text())["stages"]
    assert [(each["name"], each["status"]) for each in found] == [("first", "ok"), ("second", "running")]


def test_a_long_log_loses_its_middle(tmp_path: Path) -> None:
    long = tmp_path / "long.log"
    long.write_text("begin " + "x" * 2 * output.MOST_LOG + " end")
    found = output.shortened(long)
    assert len(found) < output.MOST_LOG + 100 and found.startswith("begin ") and found.endswith(" end")
    assert output.shortened(tmp_path / "absent.log") == ""


def test_a_result_names_no_paths() -> None:
    record = {"name": "build", "status": "failed", "reason": f"cc: {ROOT}/csrc/ops.h: no"}
    found = output.result("kernels", [record], GPU)
    assert found["stages"][0]["reason"] == "cc: ./csrc/ops.h: no"


def test_without_a_gpu_it_says_so_and_ends_with_2(tmp_path: Path) -> None:
    done = gpu_check("kernels", PATH=str(tmp_path))  # no nvidia-smi there, whatever this machine has
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "no GPU" in done.stderr


@pytest.mark.parametrize("options,said", [([], "name a call: kernels, ranks, tools"), (["kernels", "--only", "tset"], "steps")])
def test_unknown_calls_and_stages_are_refused(options: list[str], said: str) -> None:
    done = gpu_check(*options)
    assert done.returncode == 2 and said in done.stderr


def test_what_is_missing_is_said_at_once_and_all_of_it() -> None:
    found = needs.missing(True, lambda name: name not in ("torch", "nvcc", "pytest"))
    assert [text.partition(" (")[0] for text in found] == ["torch", "pytest", "nvcc"]
    assert "must come from the machine" in found[0] and "--prepare" in found[1] and "CUDA_HOME" in found[2]
    assert not any("nvcc" in text for text in needs.missing(False, lambda name: False))
    assert needs.missing(False) == []  # this machine has what a dry run needs


def test_a_machine_without_torch_ends_every_stage_within_seconds(tmp_path: Path) -> None:
    """A Python that has neither torch nor the extension starts gpu_check, and is told what it lacks."""
    out = tmp_path / "out"
    command = [PYTHON, "-S", str(ROOT / "scripts" / "gpu_check"), "ranks", "--dry-run", "--out", str(out)]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={"PATH": os.environ["PATH"]})
    assert time.monotonic() - began < 30
    assert done.returncode == 1
    assert "missing: torch (it must come from the machine" in done.stdout
    found = json.loads((out / "dry-run-ranks.json").read_text())["stages"]
    assert {each["status"] for each in found} == {"impossible"}
    assert "missing: torch" in found[0]["reason"] and "it needs the stage machine" in found[1]["reason"]


@pytest.mark.parametrize(
    "versions,said",
    [
        ({"torch": "2.9", "torch_cuda": None}, "is built for CPUs"),
        ({"torch": "2.9", "torch_cuda": "13.0"}, "sees no GPU"),
        (
            {"torch": "2.9", "torch_cuda": "12.8", "nvcc": "Build cuda_13.0.r13.0/compiler.1"},
            "nvcc is of CUDA 13, but torch 2.9 of",
        ),
    ],
)
def test_a_torch_that_cannot_use_the_gpu_is_named(versions: dict[str, str | None], said: str) -> None:
    with pytest.raises(Failed, match=said):
        work.check_cuda({"versions": versions, "gpu": {"gpu": "X"} if "nvcc" in versions else None})
    fits = {"torch": "2.9", "torch_cuda": "13.0", "nvcc": "Build cuda_13.0.r13.0/compiler.1"}
    work.check_cuda({"versions": fits, "gpu": {"gpu": "X"}})


def test_programs_are_found_beside_the_toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    for name in ("usr/local/cuda/bin/nvcc", "opt/nvidia/nsight-compute/2025.3.1/ncu", "mine/bin/compute-sanitizer"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("")
    assert place.program("nvcc", tmp_path) == str(tmp_path / "usr/local/cuda/bin/nvcc")
    assert place.program("ncu", tmp_path) == str(tmp_path / "opt/nvidia/nsight-compute/2025.3.1/ncu")
    assert place.program("compute-sanitizer", tmp_path) is None
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "mine"))
    assert place.program("compute-sanitizer", tmp_path) == str(tmp_path / "mine/bin/compute-sanitizer")


DRIVER = """
import ctypes, sys
from pathlib import Path
from laboratory.gpu import place
folder = place.driver_folder(Path(sys.argv[1]))
print(folder and (folder / "libcuda.so").resolve())
if folder:
    print(ctypes.CDLL(str(folder / "libcuda.so")).cuInit(0))
"""


@pytest.mark.parametrize("names", [["libcuda.so.1"], ["libcuda.so.1", "libcuda.so"], []])
def test_a_driver_gets_the_name_by_which_horovod_loads_it(names: list[str], tmp_path: Path) -> None:
    driver, linked = tmp_path / "driver", tmp_path / "linked"
    driver.mkdir()
    (tmp_path / "driver.c").write_text("int cuInit(int flags) { return 7; }\n")
    for name in names:
        subprocess.run(["cc", "-shared", "-fPIC", str(tmp_path / "driver.c"), "-o", str(driver / name)], check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(driver), "PYTHONPATH": str(ROOT / "scripts")}
    done = subprocess.run([PYTHON, "-c", DRIVER, str(linked)], capture_output=True, text=True, check=True, env=environment)
    wanted = [str(driver / "libcuda.so.1"), "7"] if names == ["libcuda.so.1"] else ["None"]
    assert done.stdout.splitlines() == wanted


def test_tests_that_a_limit_ended_are_counted_by_one_process_or_several() -> None:
    text = (
        "tests/a.py::b[cuda] PASSED   [ 10%]\ntests/a.py::c FAILED   [ 20%]\ntests/a.py::d SKIPPED (no) [ 30%]\ntests/a.py::e "
    )
    assert work.so_far(text) == "3 tests had ended, 1 of them passed; failures: ['tests/a.py::c']"
    text = "[gw1] [ 10%] PASSED tests/a.py::b[cuda] \n[gw0] [ 20%] FAILED tests/a.py::c \n[gw2] [ 30%] SKIPPED tests/a.py::d \n"
    assert work.so_far(text) == "3 tests had ended, 1 of them passed; failures: ['tests/a.py::c']"


COUNTERS = """\
==PROF== Connected to process 1
==PROF== Profiling "spread_tiles": 0%....100% - 2 passes
"ID","Process ID","Kernel Name","Block Size","Grid Size","dram__bytes_read.sum","gpu__time_duration.sum"
"","","","","","byte","ns"
"0","1","void gradcomp::cuda::(anonymous namespace)::take<(int)3>(float *)","(256, 1, 1)","(64, 1, 1)","1,024","2048.5"
"1","1","gradcomp::cuda::<unnamed>::spread_tiles(const float *)","(256, 1, 1)","(1, 1, 1)","n/a","7"
"""


def test_counters_are_read_kernel_by_kernel() -> None:
    first, second = tool_work.read_counters(COUNTERS)
    assert first == {
        "kernel": "take<3>",
        "grid": "(64, 1, 1)",
        "block": "(256, 1, 1)",
        "dram__bytes_read.sum": 1024.0,
        "gpu__time_duration.sum": 2048.5,
    }
    assert (second["kernel"], second["dram__bytes_read.sum"]) == ("spread_tiles", "n/a")
    assert tool_work.read_counters("==ERROR== no permission\n") == []


def fake(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    "described,option", [("--kernel-name arg", "--kernel-name"), ("--kernel-regex", "--kernel-regex"), ("", "")]
)
def test_a_sanitizer_is_asked_how_it_names_kernels(described: str, option: str, tmp_path: Path) -> None:
    fake(tmp_path / "tool", f"echo ' --kernel-name-exclude x'; echo ' {described}'")
    assert tool_work.only_ours(str(tmp_path / "tool")) == ((option, "kernel_substring=gradcomp") if option else ())


@pytest.mark.parametrize(
    "text,status,said",
    [
        ("echo '@{\"calls\": 2}'; echo '========= ERROR SUMMARY: 0 errors'", "ok", "ERROR SUMMARY: 0 errors"),
        ("echo '========= ERROR SUMMARY: 3 errors'; exit 99", "failed", "ERROR SUMMARY: 3 errors"),
        ("echo '========= Device not supported'; exit 1", "impossible", "refuses this GPU"),
    ],
)
def test_a_sanitizers_summary_is_recorded(
    text: str, status: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(tmp_path / "compute-sanitizer", text)
    monkeypatch.setattr(tool_work, "BUILD", tmp_path)
    monkeypatch.setattr(tool_work, "program", lambda name: str(tmp_path / name))
    stage = Stage("memcheck", lambda clock: tool_work.sanitized(clock, "memcheck", 1), 30)
    (record,) = stages.run([stage], 30, tmp_path, {})
    assert record["status"] == status and said in json.dumps(record)


def test_counters_that_ncu_does_not_know_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "table"
    table.write_text(COUNTERS)
    unknown = 'case "$*" in *lts__t_bytes*) echo \'==ERROR== Failed to find metric lts__t_bytes.sum\' > "$log"; exit 9;; esac'
    find_log = 'while [ "$1" != --log-file ]; do shift; done; log=$2'
    fake(tmp_path / "ncu", f'all="$*"; {find_log}; set -- $all; {unknown}; cp {table} "$log"; echo \'@{{"cases": ["a"]}}\'')
    monkeypatch.setattr(tool_work, "BUILD", tmp_path)
    monkeypatch.setattr(tool_work, "program", lambda name: str(tmp_path / name))
    stage = Stage("counters", lambda clock: tool_work.counted(clock, "cuda", "passes", "1k"), 30)
    (record,) = stages.run([stage], 30, tmp_path, {})
    assert record["status"] == "ok", record
    assert record["figures"]["cases"] == ["a"] and len(record["figures"]["kernels"]) == 2


@pytest.mark.slow
def test_a_dry_run_of_the_tools_call_writes_its_two_files(tmp_path: Path) -> None:
    done = gpu_check("tools", "--dry-run", "--only", "machine", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dry-run-tools.json", "dry-run-tools.log"]
    result = json.loads((tmp_path / "dry-run-tools.json").read_text())
    assert result["device"]["name"].startswith("none")
    assert result["versions"]["torch"]
