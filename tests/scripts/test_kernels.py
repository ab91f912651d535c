"""lab kernels and lab predict: fair rounds, a small real run, predictions and promises."""

import json
from pathlib import Path

import pytest
import torch

from laboratory import timing
from laboratory.kernels import arrays, lines, prediction, yardsticks
from laboratory.kernels.cases import cases
from laboratory.main import main

SMALL = ["kernels", "--size", "20k", "--rounds", "2", "--layers", "3", "--name", "try"]
ROOT = Path(__file__).resolve().parents[2]


def test_rounds_are_interleaved_and_the_first_does_not_count() -> None:
    order: list[tuple[str, int]] = []
    cases = [timing.Case(name, lambda i, name=name: order.append((name, i))) for name in "abc"]
    ticks = iter(range(100))

    def timer(call: object) -> float:
        call()  # type: ignore[operator]
        return float(next(ticks))

    seconds = timing.interleave(cases, 2, timer)
    assert ["".join(name for name, i in order if i == at) for at in range(3)] == ["abc", "bca", "cab"]
    assert {name: len(times) for name, times in seconds.items()} == {"a": 2, "b": 2, "c": 2}
    assert seconds["a"] == [5.0, 7.0]


def test_ratios_are_taken_within_rounds() -> None:
    seconds = {"a": [1.0, 2.0, 30.0], "b": [2.0, 4.0, 60.0]}
    assert timing.ratio(seconds, "b", "a") == (2.0, 2.0, 2.0)


def test_layers_share_the_entries() -> None:
    assert arrays.layer_sizes(10, 3) == [4, 3, 3]


def test_every_kernel_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "kernels-try.json"
    threads = torch.get_num_threads()
    try:
        assert main([*SMALL, "--out", str(tmp_path)]) == 0
    finally:
        torch.set_num_threads(threads)
    result = json.loads(out.read_text())
    named = {line["name"]: line for line in result["lines"]}
    for kernel in ("flatten", "accumulate", "spread", "offer_all", "take_topk", "take_above", "add_sparse", "settle_sparse"):
        assert named[kernel]["ms"]["low"] > 0
    assert named[arrays.ADD]["ratio_to_add"]["median"] == 1
    assert named[arrays.COPY]["share_of_copy"] == 1
    assert named[arrays.FEEDBACK]["bytes"] == 12 * 20_000
    assert {target["name"] for target in result["targets"]} == set(lines.TARGETS)
    assert {"command", "date", "commit", "machine", "versions", "settings"} <= result.keys()
    assert str(tmp_path) not in out.read_text()
    text = capsys.readouterr().out
    assert all(name in text for name in named)


def test_without_a_gpu_cuda_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["kernels", "--device", "cuda"]) == 2
    assert "no GPU" in capsys.readouterr().err


def test_every_case_has_a_prediction_and_the_page_is_up_to_date() -> None:
    names = {case.name for case in cases(arrays.Arrays(10_000, torch.device("cpu")))}
    assert set(prediction.COSTS) == names - {arrays.TORCH_TOPK, arrays.TORCH_STEP}
    results = ROOT / "benchmarks" / "results"
    found = prediction.measured(
        [json.loads(path.read_text()) for path in results.glob("gpu-*.json")], 64_000_000, prediction.H200
    )
    assert (results.parent / "gpu.md").read_text() == prediction.page(64_000_000, prediction.H200, found)


def test_a_prediction_is_that_of_the_slowest_part() -> None:
    gpu = prediction.Gpu("toy", copy=100, cache=200, issued=1000, launch=0.5)
    assert prediction.Cost(8).seconds(100, gpu) == 0.5 + 8
    assert prediction.Cost(8, 2, 40).seconds(100, gpu) == 1 + 20
    assert prediction.Cost(8, 2, 40, 300).seconds(100, gpu) == 1 + 30
    line = {"name": "flatten", "ms": {"median": 1.25}}
    stage = {"name": "kernels", "status": "ok", "figures": {"settings": {"size": 100}, "lines": [line]}}
    check = {"device": {"name": "toy 80GB"}, "stages": [stage]}
    assert prediction.measured([check], 100, gpu) == {"flatten": 1.25} and prediction.measured([check], 50, gpu) == {}
    assert "| flatten | 8 | 1 | 8500.000 | 1.250 |" in prediction.table(100, gpu, {"flatten": 1.25})


def test_the_median_of_the_yardstick_is_torchs() -> None:
    numbers = torch.randint(0, 4, (5, 1000), generator=torch.Generator().manual_seed(0)).float()
    assert torch.equal(yardsticks.median_of_five(*numbers), numbers.median(0).values)


def test_promises_for_a_gpu_are_looked_up() -> None:
    names = {*lines.SHARES, *(name for faster in lines.FASTER for name in faster.ours + faster.torchs)}
    torchs = {name for faster in lines.FASTER for name in faster.torchs}
    found = [{"name": name, "ms": {"median": 9.0 if name in torchs else 1.0}, "share_of_copy": 0.7} for name in sorted(names)]
    targets = {target["name"]: target for target in lines.gpu_targets(found)}
    assert not targets[f"{arrays.SDAGC}, momentum"]["kept"] and targets[arrays.ROUND_3]["kept"]
    assert targets[arrays.FEEDBACK]["found"] == 9 and targets[arrays.FEEDBACK]["kept"]
    assert targets[arrays.FEEDBACK]["of"].endswith(arrays.TORCH_STEP)  # like with like: both add
    assert targets[arrays.TAKE_TOPK]["of"].endswith(arrays.TORCH_TOPK)
    assert not targets["sketch + heaviest"]["kept"]
    assert all(lines.sentence(target) for target in targets.values())
