"""The benchmark program: what it is told, how it times and reports, and the kernel benchmark run for real, small."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import bench  # noqa: E402
from benchlib import kernel_cases, kernel_report, machine, options, predict, ranks, report, rounds, train  # noqa: E402


def test_sizes_are_read_as_people_write_them() -> None:
    assert [options.size(text) for text in ("16.8M", "500k", "1000")] == [16_800_000, 500_000, 1000]
    for text in ("", "1G", "999", "-5k", "3000M", "many"):
        with pytest.raises(argparse.ArgumentTypeError, match="not a size"):
            options.size(text)


def test_rates_are_those_of_the_cluster() -> None:
    assert options.rates("1gbit, 100MBIT,none") == ["1gbit", "100mbit", "none"]
    for text in ("fast", "0gbit", "1gbit,", "100"):
        with pytest.raises(argparse.ArgumentTypeError, match="not a rate"):
            options.rates(text)


def test_a_comma_inside_a_spec_does_not_end_it() -> None:
    text = "none,topk:ratio=0.01,momentum=0.9,dense,topk:ratio=0.001"
    assert options.split_specs(text) == ["none", "topk:ratio=0.01,momentum=0.9", "dense", "topk:ratio=0.001"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tpk", "did you mean 'topk'.*none, sync, horovod, fp16"),
        ("topk:raito=1", "did you mean 'ratio'"),
        ("none,none", "twice"),
        ("", "no spec"),
    ],
)
def test_a_bad_spec_is_refused_before_ranks_are_launched(text: str, said: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=said):
        options.specs(text)


def test_bad_options_end_with_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["kernels", "--rounds", "0"], ["train", "--specs", "tpk"], ["kernels", "--colour", "red"], []):
        with pytest.raises(SystemExit) as ended:
            bench.main(arguments)
        assert ended.value.code == 2
        assert "error: " in capsys.readouterr().err


def test_the_recorded_command_names_no_file() -> None:
    assert bench.without_paths(["kernels", "--json", "/some/where", "--size", "1k"]) == ["kernels", "--size", "1k"]
    assert bench.without_paths(["kernels", "--json=/some/where"]) == ["kernels"]


def test_rounds_are_interleaved_and_the_first_does_not_count() -> None:
    order: list[tuple[str, int]] = []
    cases = [rounds.Case(name, lambda i, name=name: order.append((name, i))) for name in "abc"]
    ticks = iter(range(100))

    def timer(call: object) -> float:
        call()  # type: ignore[operator]
        return float(next(ticks))

    seconds = rounds.interleave(cases, 2, timer)
    assert ["".join(name for name, i in order if i == at) for at in range(3)] == ["abc", "bca", "cab"]
    assert {name: len(times) for name, times in seconds.items()} == {"a": 2, "b": 2, "c": 2}
    assert seconds["a"] == [5.0, 7.0]


def test_ratios_are_taken_within_rounds() -> None:
    seconds = {"a": [1.0, 2.0, 30.0], "b": [2.0, 4.0, 60.0]}
    assert rounds.ratio(seconds, "b", "a") == (2.0, 2.0, 2.0)


def test_a_table_is_aligned() -> None:
    assert report.table([("", "ms"), ("copy_", "1.5"), ("a", "10")]) == "        ms\n---------\ncopy_  1.5\na       10".replace(
        "---------", "-" * 10
    )


def test_layers_share_the_entries() -> None:
    assert kernel_cases.layer_sizes(10, 3) == [4, 3, 3]


def test_the_kernel_benchmark_measures_every_kernel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "kernels.json"
    threads = torch.get_num_threads()
    try:
        assert bench.main(["kernels", "--size", "20k", "--rounds", "2", "--layers", "3", "--json", str(out)]) == 0
    finally:
        torch.set_num_threads(threads)
    result = json.loads(out.read_text())
    named = {line["name"]: line for line in result["lines"]}
    for kernel in ("flatten", "accumulate", "spread", "offer_all", "take_topk", "take_above", "add_sparse", "settle_sparse"):
        assert named[kernel]["ms"]["low"] > 0
    assert named[kernel_cases.ADD]["ratio_to_add"]["median"] == 1
    assert named[kernel_cases.COPY]["share_of_copy"] == 1
    assert named[kernel_cases.FEEDBACK]["bytes"] == 12 * 20_000
    assert {target["name"] for target in result["targets"]} == set(kernel_report.TARGETS)
    assert {"command", "date", "commit", "machine", "versions", "settings"} <= result.keys()
    assert str(tmp_path) not in out.read_text()
    said = capsys.readouterr().out
    assert all(name in said for name in named)


def test_without_a_gpu_cuda_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main(["kernels", "--device", "cuda"]) == 2
    assert "no GPU" in capsys.readouterr().err


def raw() -> dict[str, object]:
    """What train_job.py reports."""
    each = {
        "none": {"rounds": [[1.0, 1.0], [2.0, 2.0]], "bytes": 0, "loss": 2.3},
        "dense": {"rounds": [[3.0, 3.0], [6.0, 6.0]], "bytes": 400, "loss": 1.0},
        "topk:ratio=0.01": {"rounds": [[1.5, 1.5], [3.0, 3.0]], "bytes": 8, "loss": 1.1},
    }
    return {"ranks": 4, "batch": 64, "parameters": 100, "bytes_dense": 400, "specs": each}


def test_training_is_summed_up_against_none() -> None:
    run = train.summary(raw())
    lines = {line["spec"]: line for line in run["lines"]}
    assert lines["dense"]["ratio_to_none"] == {"median": 3.0, "low": 3.0, "high": 3.0}
    assert lines["dense"]["ms"] == {"median": 4500.0, "low": 3000.0, "high": 6000.0}
    assert (lines["topk:ratio=0.01"]["compression"], lines["none"]["compression"]) == (50, None)
    table = train.table(run).splitlines()
    assert len(table) == 5
    assert table[-1].split()[-2:] == ["50", "x"]


def test_results_are_told_from_what_else_the_ranks_say() -> None:
    lines = ["hello\n", "[1,0]<stdout>:@progress round 1\n", f"[1,0]<stdout>:{ranks.RESULT}{json.dumps(raw())}\n", "bye\n"]
    result, rest = ranks.listen(lines, report.Progress(), "1gbit")
    assert result == raw()
    assert rest == ["hello\n", "bye\n"]


def test_ranks_that_fail_are_reported(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    broken = [sys.executable, "-c", "print('something broke'); raise SystemExit(3)"]
    monkeypatch.setattr(train, "command", lambda launch: broken)
    assert bench.main(["train", "--hosts", "2"]) == 1
    said = capsys.readouterr().err
    assert "something broke" in said
    assert "bench.py: the ranks did not come to their end" in said
    assert "ended with 3" in said


def test_machines_are_named_by_their_model() -> None:
    assert machine.slug("AMD EPYC 7B13 (64-Core)") == "amd-epyc-7b13-64-core"
    assert machine.describe().keys() == {"cpu", "cores", "memory_gib"}


@pytest.mark.slow
def test_training_really_runs_on_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("horovod.torch", reason="bench.py train was NOT tested: Horovod is not installed")
    out = tmp_path / "train.json"
    small = ["--launcher", "horovodrun", "--hosts", "2", "--width", "16", "--rounds", "2", "--steps", "3"]
    command = [
        sys.executable,
        "scripts/bench.py",
        "train",
        *small,
        "--specs",
        "none,horovod,fp16,topk:ratio=1,wire=exact",
        "--json",
        str(out),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (run,) = json.loads(out.read_text())["runs"]
    lines = {line["spec"]: line for line in run["lines"]}
    assert lines["none"]["bytes_per_step"] == 0
    assert lines["horovod"]["bytes_per_step"] == 2 * lines["fp16"]["bytes_per_step"] == 4 * run["parameters"]
    assert lines["topk:ratio=1,wire=exact"]["bytes_per_step"] >= 8 * run["parameters"]
    assert (
        abs(lines["horovod"]["loss"] - lines["topk:ratio=1,wire=exact"]["loss"]) < 1e-5
    )  # the same training, whatever carries it


def test_every_case_has_a_prediction_and_the_page_is_up_to_date() -> None:
    names = {case.name for case in kernel_cases.Bench(10_000, torch.device("cpu")).cases()}
    assert set(predict.COSTS) == names - {kernel_cases.TORCH_TOPK, kernel_cases.TORCH_STEP}
    results = ROOT / "benchmarks" / "results"
    found = predict.measured([json.loads(path.read_text()) for path in results.glob("gpu-*.json")], 64_000_000, predict.H200)
    assert (results.parent / "gpu.md").read_text() == predict.page(64_000_000, predict.H200, found)


def test_a_prediction_is_that_of_the_slowest_part() -> None:
    gpu = predict.Gpu("toy", copy=100, cache=200, issued=1000, launch=0.5)
    assert predict.Cost(8).seconds(100, gpu) == 0.5 + 8
    assert predict.Cost(8, 2, 40).seconds(100, gpu) == 1 + 20
    assert predict.Cost(8, 2, 40, 300).seconds(100, gpu) == 1 + 30
    line = {"name": "flatten", "ms": {"median": 1.25}}
    stage = {"name": "kernels", "status": "ok", "figures": {"settings": {"size": 100}, "lines": [line]}}
    check = {"device": {"name": "toy 80GB"}, "stages": [stage]}
    assert predict.measured([check], 100, gpu) == {"flatten": 1.25} and predict.measured([check], 50, gpu) == {}
    assert "| flatten | 8 | 1 | 8500.000 | 1.250 |" in predict.table(100, gpu, {"flatten": 1.25})


def test_what_is_promised_on_a_gpu_is_looked_up() -> None:
    names = {*kernel_report.SHARES, *(name for faster in kernel_report.FASTER for name in faster.ours + faster.torchs)}
    torchs = {name for faster in kernel_report.FASTER for name in faster.torchs}
    found = [{"name": name, "ms": {"median": 9.0 if name in torchs else 1.0}, "share_of_copy": 0.7} for name in sorted(names)]
    targets = {target["name"]: target for target in kernel_report.gpu_targets(found)}
    assert not targets[f"{kernel_cases.SDAGC}, momentum"]["kept"] and targets[kernel_cases.ROUND_3]["kept"]
    assert targets[kernel_cases.FEEDBACK]["found"] == 9 and targets[kernel_cases.FEEDBACK]["kept"]
    assert not targets["sketch + heaviest"]["kept"]
    assert all(kernel_report.sentence(target) for target in targets.values())
