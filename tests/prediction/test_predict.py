"""What a prediction says: who is fastest on which link, in a table, in JSON, and in sentences for bad input."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import small_net
import torch
from torch import nn

import gradcomp
from gradcomp.prediction import measure, result, workload

SHAPES = {"a": (700, 1000), "b": (300, 1000)}
TIMES = {"forward": 0.01, "backward": 0.02}
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "EFFORT", measure.Effort(seconds=0.0))


def predicted(link: Any, ranks: int = 4, **options: Any) -> result.Prediction:
    return gradcomp.predict(SHAPES, ranks, link=link, specs=["topk", "half"], **{**TIMES, **options})


def test_a_slow_link_wants_compression_and_a_fast_one_none() -> None:
    slow, fast = predicted("100Mbit/s"), predicted("400Gbit/s", latency="1us")
    # A ring of four sends 1.5 times the 4 MB of a gradient, of which backward hides little.
    assert slow["stock"].seconds == pytest.approx(0.03 + 1.5 * 4e6 / 12.5e6, rel=0.1)
    assert slow["topk"].seconds < slow["half"].seconds < slow["stock"].seconds
    assert slow.advice.startswith("topk: ") and "x as fast as stock" in slow.advice
    assert fast.advice.startswith("stay dense: ")
    assert fast["none"].seconds == slow["none"].seconds == 0.03


def test_accumulation_is_counted_by_batch() -> None:
    """Four passes, of which the last is exchanged; the figures are those of one batch."""
    found = gradcomp.predict(SHAPES, 4, link="100Mbit/s", specs=["accumulate:steps=4"], **TIMES)
    every = found["stock"].seconds
    assert found["accumulate:steps=4"].seconds == pytest.approx((every + 3 * 0.03) / 4, rel=0.05)


def test_one_rank_has_nothing_to_send() -> None:
    found = predicted("1Gbit/s", ranks=1)
    assert found["stock"].seconds == pytest.approx(0.03, rel=0.5)
    assert "the fastest spec" in found.advice  # none is worth it


def test_by_host_uses_the_link_less() -> None:
    options = {"hosts": 2, "specs": ["topk", "topk:by_host=true"]}
    found = gradcomp.predict(SHAPES, 8, link="10Mbit/s", **TIMES, **options)
    assert found["topk:by_host=true"].waiting < 0.5 * found["topk"].waiting


def test_the_work_can_be_measured() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 400))
    data = torch.randn(64, 400)
    before = [p.detach().clone() for p in model.parameters()]
    work = workload.measured(model, lambda: model(data).square().mean(), None)
    assert 0 < work.ready["2.weight"] < work.ready["0.weight"] <= 1  # the last layer's gradient comes first
    assert work.forward > 0 and work.backward > 0 and work.optimizer == 0
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    found = gradcomp.predict(model, 4, loss=lambda: model(data).square().mean(), specs=["topk"])
    assert found.parameters == sum(p.numel() for p in model.parameters())


def test_kernels_are_timed_where_the_model_is() -> None:
    assert workload.device_of(SHAPES) == workload.device_of(nn.Linear(2, 2)) == torch.device("cpu")
    assert workload.device_of(nn.Linear(2, 2, device="meta")) == torch.device("cpu")  # a model without memory


def test_a_model_is_a_function_by_name() -> None:
    assert workload.shapes_of(workload.load("small_net:net")) == {
        name: tuple(p.shape) for name, p in small_net.net().named_parameters()
    }
    for name, said in (
        ("torch.nn:No", "'No'"),
        ("no:f", "No module"),
        ("torch", "neither a"),
        ("torch:zeros", "be called without"),
    ):
        with pytest.raises(ValueError, match=said):
            workload.load(name)


def test_every_figure_is_in_the_json_and_in_the_table() -> None:
    found = predicted("1Gbit/s")
    made = json.loads(json.dumps(found.json()))
    assert {line["spec"] for line in made["lines"]} == {"none", "stock", "bf16", "fp16", "topk", "half"}
    assert made["advice"] == found.advice and all(line["spec"] in str(found) for line in made["lines"])


def test_what_learns_is_left_out_and_named() -> None:
    found = gradcomp.predict(SHAPES, 4, specs=["lgc", "topk"], **TIMES)
    assert "lgc" in found.left_out and "lgc" not in {line.spec for line in found.lines}
    assert "left out: lgc: it sends other messages once it has learned" in str(found)


def test_a_model_in_bf16_needs_no_hook_to_bf16() -> None:
    model = nn.Linear(1000, 1000, bias=False).bfloat16()
    found = gradcomp.predict(model, 4, link="100Mbit/s", specs=["half", "topk"], **TIMES)
    assert found["stock"].bytes == found["bf16"].bytes == 2_000_000
    assert "use bf16" not in found.advice
    compression = {row.split()[0]: row.split()[-2:] for row in str(found).splitlines() if row.endswith(" x")}
    assert compression["stock"] == compression["bf16"] == ["2.0", "x"]  # of dense float32, as in stats()


def test_one_spec_needs_no_list() -> None:
    assert gradcomp.predict(SHAPES, 4, specs="topk", **TIMES)["topk"].bytes


@pytest.mark.parametrize(
    "change,said",
    [
        ({"ranks": 0}, "ranks=0 must be a whole number, at least 1"),
        ({"ranks": 3_000_000_000}, "ranks=3000000000 must be a whole number, at least 1 and at most 65536"),
        ({"model": {"w": (300_000, 300_000)}}, "'w' has 90000000000 entries, but a layer must have fewer than 2\\^31"),
        ({"model": {"w": (2**63 - 1, 5)}}, "but a layer must have fewer than 2\\^31"),
        (
            {"specs": ["accumulate:steps=0"]},
            "'accumulate:steps=0' is no way to exchange gradients; write for example accumulate:steps=4",
        ),
        ({"ranks": 2.5}, "ranks=2.5 must be a whole number"),
        ({"ranks": True}, "ranks=True must be a whole number"),
        ({"ranks": "8"}, "ranks='8' must be a whole number"),
        ({"ranks": 4, "hosts": 1.5}, "hosts=1.5 must be a whole number"),
        ({"link": 10}, "link 10 is not a rate"),
        ({"latency": 5e-6}, "latency 5e-06 is not a time"),
        ({"forward": "30ms"}, "forward='30ms' must be a time in seconds"),
        ({"ranks": 8, "hosts": 3}, "8 ranks cannot be spread evenly over 3 hosts"),
        ({"link": "fast"}, "link 'fast' is not a rate"),
        ({"latency": "5"}, "latency '5' is not a time"),
        ({"device": "foo"}, "device 'foo' is unknown; write cpu"),
        ({"device": "cuda:99"}, "device 'cuda:99' is not here; torch sees"),
        ({"device": "meta"}, "device 'meta' has no kernels"),
        ({"forward": -0.1}, "forward=-0.1 must be a time in seconds"),
        ({"backward": math.nan}, "backward=nan must be a time in seconds"),
        ({"forward": 0, "backward": 0}, "nothing to compute there is nothing to compare with"),
        ({"backward": None}, "pass forward= and backward= in seconds, or loss="),
        ({"specs": ["topk:ratio=2"]}, "topk: ratio=2"),
        ({"specs": ["nothing"]}, "there is no compressor 'nothing'"),
        ({"model": {"w": (-3, -5)}}, r"the shape \[-3, -5\] of 'w' must be whole numbers"),
        ({"model": {"w": (2.5,)}}, r"the shape \[2.5\] of 'w' must be whole numbers"),
        ({"model": {}}, "the model has no parameter to train"),
        ({"model": nn.Linear(2, 2), "loss": lambda: None}, "with loss=, all times are measured"),
        ({"model": nn.Linear(2, 2), "loss": lambda: None, "forward": None, "backward": None, "optimizer": 0.1}, "with loss=,"),
        ({"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.1)}, "measured with loss= only"),
    ],
)
def test_bad_input_gets_a_sentence(change: dict[str, Any], said: str) -> None:
    arguments: dict[str, Any] = {"model": SHAPES, "ranks": 4, **TIMES, **change}
    with pytest.raises(ValueError, match=said):
        gradcomp.predict(**arguments)


def by_command(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gradcomp", "predict", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_command_writes_a_table_and_all_figures(tmp_path: Path) -> None:
    (tmp_path / "shapes.json").write_text(json.dumps(SHAPES))
    words = ["--ranks", "4", "--bandwidth", "100Mbit/s", "--forward", "10ms", "--backward", "20ms", "--specs", "topk", "half"]
    done = by_command("--model", str(tmp_path / "shapes.json"), *words, "--json", str(tmp_path / "found.json"))
    assert done.returncode == 0, done.stderr
    assert "topk: " in done.stdout.splitlines()[-1] and "1,000,000 parameters" in done.stdout
    assert done.stderr.startswith("  0 %  none, 4 ranks") and "\r" not in done.stderr  # no terminal: lines
    assert json.loads((tmp_path / "found.json").read_text())["parameters"] == 1_000_000
    done = by_command("--model", "torch.nn:ReLU", *words)
    assert done.returncode == 2 and "the model has no parameter to train" in done.stderr
    done = by_command("--model", str(tmp_path / "none.json"), *words)
    assert done.returncode == 2 and "none.json" in done.stderr and "Traceback" not in done.stderr


def test_a_spec_with_rules_stays_whole(tmp_path: Path) -> None:
    (tmp_path / "shapes.json").write_text(json.dumps({"a": [100, 100], "a.bias": [100]}))
    words = ["--model", str(tmp_path / "shapes.json"), "--ranks", "4", "--forward", "1ms", "--backward", "2ms"]
    out = ["--json", str(tmp_path / "found.json")]
    done = by_command(*words, "--specs", "topk; *.bias=dense", "accumulate:steps=2", "--specs", "half", *out)
    assert done.returncode == 0, done.stderr
    lines = json.loads((tmp_path / "found.json").read_text())["lines"]
    assert {"topk; *.bias=dense", "accumulate:steps=2", "half"} <= {line["spec"] for line in lines}
    for bad, said in (
        (["--threads", "0"], "--threads 0 must be"),
        (["--device", "foo"], "device 'foo' is unknown"),
        (["--forward", "0s", "--backward", "0s"], "nothing to compute"),
        (["--latency", "1e999s"], "'1e999s' is not a time"),
        (["--bandwidth", "1e999Gbit/s"], "--bandwidth '1e999Gbit/s' is not a rate"),
    ):
        done = by_command(*words, *bad)
        assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
    assert all(name in by_command("--help").stdout for name in ("accumulate:steps=N", "quote a spec"))


def test_the_link_inside_hosts_is_an_option(tmp_path: Path) -> None:
    (tmp_path / "shapes.json").write_text(json.dumps({"a": [100, 100]}))
    words = ["--model", str(tmp_path / "shapes.json"), "--ranks", "4", "--hosts", "2", "--forward", "1ms", "--backward", "2ms"]
    done = by_command(*words, "--specs", "half", "--inside", "200Gbit/s", "--latency-inside", "3us")
    assert done.returncode == 0, done.stderr
    assert "10 Gbit/s, 50 us between hosts, 200 Gbit/s, 3 us inside" in done.stdout.splitlines()[0]


def test_a_spec_that_was_not_predicted_is_named() -> None:
    found = gradcomp.predict(SHAPES, 4, specs=["topk", "lgc"], **TIMES)
    with pytest.raises(KeyError, match="'topkk' was not predicted; known: none, stock, bf16, fp16, topk"):
        found["topkk"]
    with pytest.raises(KeyError, match="'lgc' was left out: it sends other messages"):
        found["lgc"]


@pytest.mark.parametrize(
    "link,said", [("100Mbit/s", r"use (bf16|fp16): \S+ x as fast as stock"), ("400Gbit/s", "stay dense: ")]
)
def test_without_specs_the_advice_speaks_of_none(link: str, said: str) -> None:
    advice = gradcomp.predict(SHAPES, 4, link=link, latency="1us", specs=["accumulate:steps=2"], **TIMES).advice
    assert re.match(said, advice) and "fastest spec" not in advice
