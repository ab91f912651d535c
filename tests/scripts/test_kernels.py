"""lab kernels: fair rounds, a small real run, and promises; and lab resources, with nvcc and without a GPU."""

import ctypes
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from gradcomp.native import extension
from laboratory import kernel_cases as cases
from laboratory import kernel_prediction, report, timing
from laboratory.commands import resources
from laboratory.commands.resources import Budget, Use
from laboratory.kernel_prediction import Cost, Kernel
from laboratory.main import main
from laboratory.options import Refused

SMALL = ["kernels", "--size", "20k", "--rounds", "2", "--layers", "3", "--name", "try"]
ROOT = Path(__file__).resolve().parents[2]


def test_rounds_are_interleaved_and_the_first_does_not_count() -> None:
    order: list[tuple[str, int]] = []
    every = [timing.Case(name, lambda i, name=name: order.append((name, i))) for name in "abc"]
    ticks = iter(range(100))

    def timer(call: object) -> float:
        call()  # type: ignore[operator]
        return float(next(ticks))

    seconds = timing.interleave(every, 2, timer)
    assert ["".join(name for name, i in order if i == at) for at in range(3)] == ["abc", "bca", "cab"]
    assert {name: len(times) for name, times in seconds.items()} == {"a": 2, "b": 2, "c": 2}
    assert seconds["a"] == [5.0, 7.0]


def test_ratios_are_taken_within_rounds() -> None:
    seconds = {"a": [1.0, 2.0, 30.0], "b": [2.0, 4.0, 60.0]}
    assert timing.ratio(seconds, "b", "a") == (2.0, 2.0, 2.0)


def test_every_kernel_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "kernels-try.json"
    threads = torch.get_num_threads()
    try:
        assert main([*SMALL, "--out", str(tmp_path)]) == 0
    finally:
        torch.set_num_threads(threads)
    result = json.loads(out.read_text())
    named = {line["name"]: line for line in result["lines"]}
    for kernel in ("flatten", "collect", "spread", "offer_all", "take_topk", "take_above", "add_sparse", "settle_sparse"):
        assert named[kernel]["ms"]["low"] > 0
    assert named[cases.ADD]["ratio_to_add"]["median"] == 1
    assert named[cases.COPY]["share_of_copy"] == 1
    assert named[cases.FEEDBACK]["bytes"] == 12 * 20_000
    assert {"command", "date", "commit", "machine", "versions", "settings"} <= result.keys()
    assert str(tmp_path) not in out.read_text()
    text = capsys.readouterr().out
    assert all(name in text for name in named)


def test_without_a_gpu_cuda_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["kernels", "--device", "cuda"]) == 2
    assert "no GPU" in capsys.readouterr().err


RESULTS, PAGE = ROOT / "benchmarks" / "results", (ROOT / "benchmarks" / "gpu.md").read_text()
RECORD = report.read(RESULTS / "kernels-cuda-h100.json")
NEWEST = {name: report.read(RESULTS / f"kernels-{name}cuda-h200.json") for name in ("", "layers-", "6m-")}


def share_of(line: dict[str, Any]) -> str:
    return report.figure(line["share_of_copy"] and 100 * line["share_of_copy"], "{:.0f} %")


def test_the_page_of_gpu_times_is_that_of_its_records() -> None:
    rows = [["on 64 M entries, ms", "H100", "of the copy bandwidth", "25.6 M, 161 layers", "6.25 M"]]
    smaller = [
        {line["name"]: share_of(line) for line in report.read(RESULTS / f"kernels-{name}-cuda-h100.json")["lines"]}
        for name in ("layers", "6m")
    ]
    for line in RECORD["lines"]:
        shares = [of.get(line["name"], "-") for of in smaller]
        rows.append([line["name"], report.milliseconds(line["ms"]["median"]), share_of(line), *shares])
    table = report.markdown(rows)
    assert RECORD["settings"]["size"] == 64_000_000 and table in PAGE, table


def test_the_page_of_an_h200_is_that_of_its_records_and_of_the_predictions() -> None:
    large, *others = NEWEST.values()
    predicted = kernel_prediction.milliseconds(large["settings"]["size"], large["machine"]["gpu"])
    smaller = [{line["name"]: share_of(line) for line in each["lines"]} for each in others]
    rows = [["on 64 M entries, ms", "H200", "of the copy bandwidth", "predicted", "25.6 M, 161 layers", "6.25 M"]]
    for line in large["lines"]:
        shares = [of.get(line["name"], "-") for of in smaller]
        same = predicted[line["name"]] if line["name"] in kernel_prediction.AS_RECORDED else None
        own = report.milliseconds(line["ms"]["median"]), share_of(line), report.figure(same, "{:.3f}")
        rows.append([line["name"], *own, *shares])
    assert report.markdown(rows) in PAGE, report.markdown(rows)


def test_the_page_of_newer_kernels_is_that_of_the_predictions() -> None:
    """Of all cases that a record does not have as they are now."""
    sizes = {"64 M entries, ms": 64_000_000, "6.25 M": 6_250_000}
    predicted = {size: kernel_prediction.milliseconds(entries, "NVIDIA H200") for size, entries in sizes.items()}
    rows = [["predicted of an H200", *sizes, "launches and memsets", "meetings"]]
    for name, cost in kernel_prediction.COSTS.items():
        if name not in kernel_prediction.AS_RECORDED:
            times = [f"{of[name]:.3f}" for of in predicted.values()]
            rows.append([name, *times, str(cost.launches + cost.others), str(cost.meetings or "-")])
    assert report.markdown(rows) in PAGE, report.markdown(rows)


def test_predictions_count_the_launches_that_the_emulator_counts(emulator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "native", emulator)
    count = ctypes.CDLL(emulator.__file__).simt_launches
    count.restype = ctypes.c_uint64
    launches = {}
    for case in cases.cases(cases.Arrays(10_000, torch.device("cpu"))):
        for i in range(2):  # the first makes state
            case.before(i)
            before = count()
            case.call(i)
            launches[case.name] = count() - before
    of_torch = {cases.COPY: 0, cases.ADD: 0}
    assert (
        launches.items() >= {name: of_torch.get(name, cost.launches) for name, cost in kernel_prediction.COSTS.items()}.items()
    )


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_the_page_of_steps_and_of_a_training_on_a_gpu_is_that_of_its_records(gpu: str) -> None:
    rows = [["way", "optimizer", "bucket MB", "step ms", "GPU ms", "own kernels ms", "own launches"]]
    for way in report.read(RESULTS / f"gpt-{gpu}.json")["ways"]:
        times = [f"{way[name]:.1f}" for name in ("step_ms", "gpu_ms")]
        own = [f"{way['own_ms']:.2f}", str(way["own_launches"])] if way["own_launches"] else ["-", "-"]
        rows.append([f"`{way['way']}`", way["optimizer"], str(way["bucket_mb"]), *times, *own])
    assert report.markdown(rows) in PAGE, report.markdown(rows)
    rows = [["spec", "accuracy", "compression", "seconds"]]
    for one in report.read(RESULTS / f"training-{gpu}.json")["trainings"]:
        rows.append([f"`{one['spec']}`", f"{one['accuracy']:.2f} %", f"{one['compression']:,}", f"{one['seconds']:.0f}"])
    assert report.markdown(rows) in PAGE, report.markdown(rows)


@pytest.mark.parametrize(("name", "near"), [("", 0.1), ("layers-", 0.2), ("6m-", 0.25)])
def test_predictions_are_near_the_newest_record(name: str, near: float) -> None:
    """Of kernels that are still the record's. Shorter calls than 0.05 ms are launches alone, which vary with the machine."""
    names = {case.name for case in cases.cases(cases.Arrays(10_000, torch.device("cpu")))}
    assert set(kernel_prediction.COSTS) == names - {cases.TORCH_TOPK, cases.TORCH_STEP}
    record = NEWEST[name]
    predicted = kernel_prediction.milliseconds(record["settings"]["size"], record["machine"]["gpu"])
    assert {line["name"] for line in record["lines"]} >= kernel_prediction.AS_RECORDED
    for line in record["lines"]:
        if line["name"] not in kernel_prediction.AS_RECORDED or (measured := line["ms"]["median"]) < 0.05:
            continue
        assert predicted[line["name"]] == pytest.approx(measured, rel=near), line["name"]


@pytest.mark.parametrize("name", ["sum_squares", "flatten"])
def test_predictions_of_passes_are_near_an_h100s(name: str) -> None:
    """The other kernels have been rewritten since."""
    predicted = kernel_prediction.milliseconds(RECORD["settings"]["size"], RECORD["machine"]["gpu"])
    (measured,) = (line["ms"]["median"] for line in RECORD["lines"] if line["name"] == name)
    assert predicted[name] == pytest.approx(measured, rel=0.15)


def test_a_prediction_sums_the_slowest_part_of_each_kernel() -> None:
    gpu = kernel_prediction.Gpu("NVIDIA H100", copy=64, launch=0.5)
    memory, computing = Kernel(8, 1e11), Kernel(8, 0.25e12)
    assert Cost((memory,)).seconds(64, gpu) == 0.5 + 8
    assert Cost((memory, computing), 3).seconds(64, gpu) == 1.5 + 8 + 16
    assert Cost((memory,), 1, 2, 4).seconds(64, gpu) == 3 * 0.5 + 4 * kernel_prediction.MEETING + 8
    assert kernel_prediction.milliseconds(64, "NVIDIA H200 141GB") and not kernel_prediction.milliseconds(64, "Tesla T4")


REPORT = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'gradcomp::cuda::(anonymous namespace)::find(float const*, long)' for 'sm_90'
ptxas info    : Function properties for gradcomp::cuda::(anonymous namespace)::find(float const*, long)
    100 bytes stack frame, 44 bytes spill stores, 40 bytes spill loads
ptxas info    : Used 80 registers, used 0 barriers, 448 bytes cumulative stack size
ptxas info    : Compiling entry function 'void gradcomp::cuda::add_tiles<true>(gradcomp::Pieces)' for 'sm_90'
ptxas info    : Function properties for void gradcomp::cuda::add_tiles<true>(gradcomp::Pieces)
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 65 registers, used 1 barriers, 4140 bytes smem
"""


def test_a_report_of_nvcc_is_read_kernel_by_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    find, tiles = resources.parse("x.cu", REPORT)
    assert find == Use("x.cu", "find(float const*, long)", 80, 100, 84, 0)
    assert tiles == Use("x.cu", "add_tiles<true>(Pieces)", 65, 0, 0, 4140)
    assert resources.exceeded([find, tiles]) == ["x.cu: add_tiles<true>(Pieces) uses 65 registers, above the 64 of its budget"]
    with pytest.raises(Refused, match="unknown form"):
        resources.parse("x.cu", REPORT.replace("Used", "Took"))
    use = Use("x.cu", "f()", 10, 1, 2, 3)
    for budget, count in ((Budget(9, 0, 1, 2), 4), (Budget(10, 1, 2, 3), 0)):
        monkeypatch.setattr(resources, "EXCEPTIONS", {r"f\(": (budget, "a test")})
        assert len(resources.exceeded([use])) == count


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(Refused, match="nvcc was not found; install the CUDA toolkit"):
        resources.measure("sm_90")


@pytest.mark.long
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc was not found, so what it makes of the kernels is NOT checked")
def test_no_kernel_needs_more_than_it_is_allowed() -> None:
    uses = resources.measure("sm_90")
    kernels = {re.split(r"[<(]", use.kernel)[0] for use in uses}
    written = {
        name
        for file in (ROOT / "csrc" / "cuda").iterdir()
        for name in re.findall(r"__global__ void (?:__launch_bounds__\([\w<>:, ]+\))?\s*(\w+)\(", file.read_text())
    }
    assert kernels == written
    assert resources.exceeded(uses) == []
    assert all(any(re.search(pattern, use.kernel) for use in uses) for pattern in resources.EXCEPTIONS)
