"""What a prediction says: who is fastest on which link, in a table, in JSON, for another machine, and for bad input."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import small_net
import torch
from torch import nn

import gradcomp
from gradcomp.core.requests import World
from gradcomp.prediction import command, measure, profile
from gradcomp.prediction.predict import device_for, shapes_of
from gradcomp.prediction.profile import Profile

SHAPES = {"a": (700, 1000), "b": (300, 1000)}
TIMES: dict[str, Any] = {"forward": 0.01, "backward": 0.02}
# Kernels' times of an H100: no figure depends on a clock.
STEADY: dict[str, Any] = {**TIMES, "profile": "h100"}
CPU = torch.device("cpu")
FOUR = World(0, 4, (0, 1, 2, 3))
COSTS = {"fixed": 2e-4, "layer": 1e-5, "entry": 3e-9, "payload": 2e-5, "byte": 1e-8}
REDUCE = {"start>reduce": COSTS, "start>reduce>end": COSTS}
MACHINE = Profile(
    "test machine",
    {"stock": REDUCE, "bf16": REDUCE, "fp16": REDUCE, "topk": {"start>gather": COSTS, "start>gather>end": COSTS}},
)


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "SECONDS", 0.0)


def test_a_slow_link_wants_compression_and_a_fast_one_none() -> None:
    specs = ["topk", "half"]
    slow = gradcomp.predict(SHAPES, 4, link="100Mbit/s", specs=specs, **STEADY)
    fast = gradcomp.predict(SHAPES, 4, link="400Gbit/s", latency="1us", specs=specs, **STEADY)
    # A ring of four sends 1.5 times the 4 MB of a gradient, of which backward hides little.
    assert slow["stock"].seconds == pytest.approx(0.03 + 1.5 * 4e6 / 12.5e6, rel=0.1)
    assert slow["topk"].seconds < slow["half"].seconds < slow["stock"].seconds
    assert slow.advice.startswith("topk: ") and "x as fast as stock" in slow.advice
    assert fast.advice.startswith("stay dense: the fastest spec, ")
    assert fast["none"].seconds == slow["none"].seconds == 0.03


@pytest.mark.parametrize("link,said", [("100Mbit/s", ("use bf16: ", "use fp16: ")), ("400Gbit/s", ("stay dense: ",))])
def test_without_specs_the_advice_speaks_of_none(link: str, said: tuple[str, ...]) -> None:
    """Accumulation trains differently, so it is no candidate. Its figures are those of one batch of four."""
    found = gradcomp.predict(SHAPES, 4, link=link, latency="1us", specs=["accumulate:steps=4"], **STEADY)
    assert found.advice.startswith(said) and "fastest spec" not in found.advice
    assert found["accumulate:steps=4"].seconds == pytest.approx((found["stock"].seconds + 3 * 0.03) / 4)


def test_one_rank_has_nothing_to_send() -> None:
    found = gradcomp.predict(SHAPES, 1, link="1Gbit/s", specs="topk", **STEADY)  # one spec needs no list
    assert found["stock"].seconds == pytest.approx(0.03 + found["stock"].encoding) and not found["stock"].waiting
    assert "the fastest spec" in found.advice  # none is worth it


def test_by_host_uses_the_link_less() -> None:
    specs = ["topk", "topk:by_host=true"]
    found = gradcomp.predict(SHAPES, 8, hosts=2, link="10Mbit/s", specs=specs, **TIMES)
    assert found["topk:by_host=true"].waiting < 0.5 * found["topk"].waiting


def test_kernels_are_timed_where_the_model_is() -> None:
    assert device_for(SHAPES) == device_for(nn.Linear(2, 2)) == CPU
    assert device_for(nn.Linear(2, 2, device="meta")) == CPU  # a model without memory


def test_a_model_is_a_function_by_name() -> None:
    shapes = {name: tuple(p.shape) for name, p in small_net.net().named_parameters()}
    assert shapes_of(command.load("small_net:net")) == shapes
    for name, why in (("torch.nn:No", "'No'"), ("no:f", "No module"), ("torch", "attribute ''"), ("torch:zeros", "zeros")):
        with pytest.raises(ValueError, match=f"model '{name}' is neither a .json file nor a function here.*{why}"):
            command.load(name)
    with pytest.raises(ValueError, match="returns a Generator; name a function that returns the model"):
        command.load("torch:Generator")


def test_a_model_may_stand_in_the_folder_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_net.py").write_text("from torch import nn\n\ndef net():\n    return nn.Linear(2, 3)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])  # as a console script has it
    assert shapes_of(command.load("own_net:net")) == {"weight": (3, 2), "bias": (3,)}


def test_every_figure_is_in_the_json_and_in_the_table() -> None:
    found = gradcomp.predict(SHAPES, 4, specs=["topk", "half", "lgc"], **TIMES)
    made = json.loads(json.dumps(found.json()))
    assert {line["spec"] for line in made["lines"]} == {"none", "stock", "bf16", "fp16", "topk", "half"}
    assert made["advice"] == found.advice and all(line["spec"] in str(found) for line in made["lines"])
    assert str(found).startswith(found.advice)
    assert "left out: lgc: it sends other messages once it has learned" in str(found)
    with pytest.raises(KeyError, match="'topkk' was not predicted; known: none, stock, bf16, fp16, topk"):
        found["topkk"]
    with pytest.raises(KeyError, match="'lgc' was left out: it sends other messages"):
        found["lgc"]


def test_a_model_in_bf16_needs_no_hook_to_bf16() -> None:
    model = nn.Linear(1000, 1000, bias=False).bfloat16()
    found = gradcomp.predict(model, 4, link="100Mbit/s", specs=["half", "topk"], **STEADY)
    assert found["stock"].bytes == found["bf16"].bytes == 2_000_000
    assert "use bf16" not in found.advice
    compression = {row.split()[0]: row.split()[-2:] for row in str(found).splitlines() if row.endswith(" x")}
    assert compression["stock"] == compression["bf16"] == ["2.0", "x"]  # of dense float32, as in stats()


@pytest.mark.parametrize(
    "change,said",
    [
        ({"ranks": 0}, "ranks=0 must be a whole number, at least 1"),
        ({"ranks": 3_000_000_000}, "ranks=3000000000 must be a whole number, at least 1 and at most 65536"),
        ({"ranks": 2.5}, "ranks=2.5 must be a whole number"),
        ({"ranks": True}, "ranks=True must be a whole number"),
        ({"ranks": "8"}, "ranks='8' must be a whole number"),
        ({"hosts": 1.5}, "hosts=1.5 must be a whole number"),
        ({"ranks": 8, "hosts": 3}, "8 ranks cannot be spread evenly over 3 hosts"),
        ({"link": 10}, "link 10 is not a rate"),
        ({"latency": 5e-6}, "latency 5e-06 is not a time"),
        ({"device": "foo"}, "device 'foo' is not here"),
        ({"device": "cuda:99"}, "device 'cuda:99' is not here"),
        ({"device": "meta"}, "device 'meta' is not here or has no kernels"),
        ({"forward": "30ms"}, "forward='30ms' must be a time in seconds"),
        ({"forward": -0.1}, "forward=-0.1 must be a time in seconds"),
        ({"backward": math.nan}, "backward=nan must be a time in seconds"),
        ({"forward": 0, "backward": 0}, "nothing to compute there is nothing to compare with"),
        ({"backward": None}, "backward=None must be a time in seconds"),
        ({"specs": ["topk:ratio=2"]}, "topk: ratio=2"),
        ({"specs": ["nothing"]}, "there is no compressor 'nothing'"),
        ({"specs": ["accumulate:steps=0"]}, "'accumulate:steps=0' is no way .*; write for example accumulate:steps=4"),
        ({"model": {"w": (-3, -5)}}, r"the shape \[-3, -5\] of 'w' must be whole numbers"),
        ({"model": {"w": (2.5,)}}, r"the shape \[2.5\] of 'w' must be whole numbers"),
        ({"model": {"w": (2**63 - 1, 5)}}, "but a layer must have fewer than 2\\^31"),
        ({"model": None}, r"the model, which can be a torch.nn.Module, is a NoneType; pass \{name: shape\}"),
        ({"specs": [None]}, "specs has None; write each spec as a text"),
        ({"model": {}}, "the model has no parameter to train"),
        ({"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.1)}, r"optimizer=SGD (.|\n)* must be a time"),
        ({"profile": "h200"}, "there is no profile 'h200'; write h100, or leave the profile out"),
        ({"profile": "h100", "device": "cpu"}, "give one of them"),
    ],
)
def test_bad_input_gets_a_sentence(change: dict[str, Any], said: str) -> None:
    arguments: dict[str, Any] = {"model": SHAPES, "ranks": 4, **TIMES, **change}
    with pytest.raises(ValueError, match=said):
        gradcomp.predict(**arguments)


@pytest.mark.parametrize("name", ["own_models.py:Net", "own_models:Net", "inside/own_others.py:Net"])
def test_a_model_in_a_file_here_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inside").mkdir()
    for file in ("own_models.py", "inside/own_others.py"):
        (tmp_path / file).write_text("import torch\n\ndef Net():\n    return torch.nn.Linear(3, 2)\n")
    monkeypatch.syspath_prepend(tmp_path)  # as python -m does with the folder that it is called in
    assert shapes_of(command.load(name)) == {"weight": (2, 3), "bias": (2,)}


def by_command(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gradcomp", "predict", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_command_writes_a_table_and_all_figures(tmp_path: Path) -> None:
    (tmp_path / "shapes.json").write_text(json.dumps(SHAPES))
    words = ["--ranks", "4", "--hosts", "2", "--forward", "10ms", "--backward", "20ms", "--inside", "200Gbit/s"]
    words += ["--latency-inside", "3us", "--specs", "topk; b=dense", "accumulate:steps=2", "--specs", "half"]
    done = by_command("--model", str(tmp_path / "shapes.json"), *words, "--json", str(tmp_path / "found.json"))
    assert done.returncode == 0, done.stderr
    assert "10 Gbit/s, 50 us between hosts, 200 Gbit/s, 3 us inside; 1,000,000 parameters" in done.stdout.splitlines()[2]
    assert done.stderr.startswith("  0 %  none, 4 ranks\n")
    lines = json.loads((tmp_path / "found.json").read_text())["lines"]
    assert {"topk; b=dense", "accumulate:steps=2", "half"} <= {line["spec"] for line in lines}


def test_bad_words_of_the_command_get_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from gradcomp.__main__ import main

    (tmp_path / "shapes.json").write_text(json.dumps({"a": [100, 100]}))
    words = ["predict", "--model", str(tmp_path / "shapes.json"), "--ranks", "4", "--forward", "1ms", "--backward", "2ms"]
    for bad, said in (
        (["--threads", "0"], "--threads 0 must be"),
        (["--device", "foo"], "device 'foo' is not here"),
        (["--forward", "0s", "--backward", "0s"], "nothing to compute"),
        (["--latency", "1e999s"], "--latency '1e999s' is not a time"),
        (["--bandwidth", "1e999Gbit/s"], "--bandwidth '1e999Gbit/s' is not a rate"),
        (["--model", "torch.nn:ReLU"], "the model has no parameter to train"),
        (["--model", str(tmp_path / "none.json")], "none.json holds no shapes"),
        (["--profile", "h200"], "there is no profile 'h200'"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main([*words, *bad])
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        main(["predict", "--help"])
    out = capsys.readouterr().out
    assert "accumulate:steps=N" in out and "quote a spec" in out


# The profile of a machine that is not here


def test_sizes_are_those_of_what_arrives() -> None:
    shapes = {"a": (300, 100), "b": (100,)}
    (bucket,) = measure.measure("topk", shapes, FOUR, 25, CPU)
    (first, encoding), (last, decoding) = profile.roles_of(bucket, shapes, FOUR)
    message = bucket.parts[0].message
    assert message is not None and (first, last) == ("start>gather", "start>gather>end")
    assert encoding == {"fixed": 1, "layer": 2, "entry": 30_100, "payload": 0, "byte": 0}
    assert decoding == {**encoding, "payload": 4, "byte": 4 * message.bytes}


def test_a_prediction_has_the_costs_of_the_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradcomp.prediction.predict.load", {"machine": MACHINE}.get)
    specs = ["topk:ratio=0.01", "half", "accumulate:steps=2"]
    made = gradcomp.predict(SHAPES, 4, specs=specs, profile="machine", **TIMES)
    assert {line.spec for line in made.lines} == {"none", "stock", "bf16", "fp16", "topk:ratio=0.01", "accumulate:steps=2"}
    assert made.left_out == {"half": f"the profile of test machine has only times of {', '.join(MACHINE.seconds)}"}
    assert "kernels of test machine, as its profile says" in str(made).splitlines()[2]
    (encoding,) = {line.encoding for line in made.lines if line.spec in ("stock", "bf16")}
    assert encoding == pytest.approx(2 * (2 * 2e-4 + 2 * 1e-5 + 1_000_000 * 3e-9))  # of two buckets


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_the_profile_of_an_h100_comes_with_the_package(ranks: int) -> None:
    found = gradcomp.predict({f"layer {i}": (256, 512) for i in range(8)}, ranks, profile="h100", **TIMES)
    assert "kernels of NVIDIA H100 (host work: one thread of an AMD EPYC" in str(found).splitlines()[2]
    assert {line.spec for line in found.lines} >= {"none", "stock", "bf16", "dense", "half", "topk", "sdagc", "orq", "bingrad"}
    assert "has only times of stock" in found.left_out["gs_sgd"]
    # 4 MB are read and written in some microseconds. A bucket costs the host some tenths of a millisecond.
    assert 1e-5 < found["topk"].encoding < 5e-3 and 5e-5 < found["stock"].encoding < 5e-3


def test_rules_for_layers_are_priced_by_layer() -> None:
    assert not MACHINE.lacks("topk:warmup=100,ratio=0.01; b=topk:ratio=0.01", SHAPES)
    assert MACHINE.lacks("topk:ratio=0.01; b=dense", SHAPES)


def test_a_part_without_times_is_named() -> None:
    other = MACHINE._replace(seconds={"topk": {"start>gather": COSTS}})
    buckets = measure.measure("topk:ratio=0.01", SHAPES, FOUR, 25, CPU)
    with pytest.raises(ValueError, match=r"no times of topk:ratio=0\.01 for start>gather>end, which 4 ranks need; leave topk"):
        other.priced("topk:ratio=0.01", buckets, SHAPES, FOUR)
