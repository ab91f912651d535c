"""What a prediction says: who is fastest on which link, in a table, in JSON, for another machine, and for bad input."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import small_net
import torch
from torch import nn

import gradcomp
from gradcomp.prediction import command, measure, recording_network
from gradcomp.prediction.predict import device_for, shapes_of
from laboratory.tasks.texts import Transformer

SHAPES = {"a": (700, 1000), "b": (300, 1000)}
TIMES: dict[str, Any] = {"forward_time": 0.01, "backward_time": 0.02}
CPU = torch.device("cpu")
RECORDS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "SECONDS", 0.0)


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every part of a step take 0.2 ms, so that no figure depends on a clock."""
    ticks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: 2e-4 * next(ticks))
    monkeypatch.setattr(recording_network, "time", clock)


@pytest.mark.usefixtures("steady")
def test_a_slow_link_wants_compression_and_a_fast_one_none() -> None:
    specs = ["topk", "half"]
    slow = gradcomp.predict(SHAPES, 4, link="100Mbit/s", specs=specs, **TIMES)
    fast = gradcomp.predict(SHAPES, 4, link="400Gbit/s", latency="1us", specs=specs, **TIMES)
    # A ring of four sends 1.5 times the 4 MB of a gradient, of which backward hides little.
    assert slow["stock"].seconds == pytest.approx(0.03 + 1.5 * 4e6 / 12.5e6, rel=0.1)
    assert slow["topk"].seconds < slow["half"].seconds < slow["stock"].seconds
    assert slow.advice.startswith("topk: ") and "x as fast as uncompressed" in slow.advice
    assert fast.advice.startswith("stay dense: the fastest spec, ")
    assert fast["none"].seconds == slow["none"].seconds == 0.03


@pytest.mark.usefixtures("steady")
@pytest.mark.parametrize("link,said", [("100Mbit/s", ("use bf16: ", "use fp16: ")), ("400Gbit/s", ("stay dense: ",))])
def test_without_specs_the_advice_speaks_of_none(link: str, said: tuple[str, ...]) -> None:
    """Accumulation trains differently, so it is no candidate. Its figures are those of one batch of four."""
    found = gradcomp.predict(SHAPES, 4, link=link, latency="1us", specs=["accumulate:steps=4"], **TIMES)
    assert found.advice.startswith(said) and "fastest spec" not in found.advice
    assert found["accumulate:steps=4"].seconds == pytest.approx((found["stock"].seconds + 3 * 0.03) / 4)


@pytest.mark.usefixtures("steady")
def test_local_steps_share_an_exchange() -> None:
    """They train differently, so they are no candidates."""
    found = gradcomp.predict(SHAPES, 4, link="10Mbit/s", latency="1us", specs=["sign every=30", "dense every=30"], **TIMES)
    dense = found["dense every=30"]
    assert dense.seconds == pytest.approx(0.03 + 1.5 * 4e6 / 1.25e6 / 30, rel=0.02)
    assert dense.bytes == found["stock"].bytes // 30
    assert found["sign every=30"].seconds == pytest.approx(0.03 + 3 * 4e6 / 32 / 1.25e6 / 30, rel=0.1)
    assert "every=" not in found.advice


def test_predicted_local_steps_are_near_those_of_emulated_hosts() -> None:
    record = json.loads((RECORDS / "train-local-10mbit.json").read_text())["runs"][0]
    measured = {line["way"]: line for line in record["lines"]}
    alone = measured["none"]["ms"]["median"] / 1000
    settings = record["settings"]
    model = Transformer(0, settings["width"], settings["depth"])
    times = {"forward_time": alone / 3, "backward_time": alone * 2 / 3}
    ways = {f"{spec} every=30": f"local:30/0.9/0.7/{spec}" for spec in ("sign", "dense")}
    found = gradcomp.predict(model, record["hosts"], link="10Mbit/s", specs=[*ways], **times)
    for spec, way in ways.items():
        assert found[spec].seconds / alone == pytest.approx(measured[way]["over"]["none"]["median"], rel=0.1)


@pytest.mark.usefixtures("steady")
def test_one_rank_has_nothing_to_send() -> None:
    found = gradcomp.predict(SHAPES, 1, link="1Gbit/s", specs="topk", **TIMES)  # one spec needs no list
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


@pytest.mark.usefixtures("steady")
def test_a_model_in_bf16_needs_no_hook_to_bf16() -> None:
    model = nn.Linear(1000, 1000, bias=False).bfloat16()
    found = gradcomp.predict(model, 4, link="100Mbit/s", specs=["half", "topk"], **TIMES)
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
        ({"forward_time": "30ms"}, "forward_time='30ms' must be a time in seconds"),
        ({"forward_time": -0.1}, "forward_time=-0.1 must be a time in seconds"),
        ({"backward_time": math.nan}, "backward_time=nan must be a time in seconds"),
        ({"forward_time": 0, "backward_time": 0}, "nothing to compute there is nothing to compare with"),
        ({"backward_time": None}, "backward_time=None must be a time in seconds"),
        ({"specs": ["topk:ratio=2"]}, "topk: ratio=2"),
        ({"specs": ["nothing"]}, "there is no compressor 'nothing'"),
        ({"specs": ["accumulate:steps=0"]}, "'accumulate:steps=0' is not a way .*; write for example accumulate:steps=4"),
        ({"specs": ["sign every=0"]}, "'sign every=0' is not an exchange of local steps; write for example 'sign every=30'"),
        ({"specs": ["stock every=2"]}, "'stock every=2' is not an exchange of local steps"),
        ({"specs": ["sign every=2"], "fsdp": True}, "sign every=2"),
        ({"model": {"w": (-3, -5)}}, r"the shape \[-3, -5\] of 'w' must be whole numbers"),
        ({"model": {"w": (2.5,)}}, r"the shape \[2.5\] of 'w' must be whole numbers"),
        ({"model": {"w": (2**63 - 1, 5)}}, "but a layer must have fewer than 2\\^31"),
        ({"model": None}, r"the model, which can be a torch.nn.Module, is a NoneType; pass \{name: shape\}"),
        ({"specs": [None]}, "specs has None; write each spec as a text"),
        ({"model": {}}, "the model has no parameter to train"),
        ({"optimizer_time": torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.1)}, r"optimizer_time=SGD (.|\n)* must be a time"),
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
    ):
        with pytest.raises(SystemExit, match="2"):
            main([*words, *bad])
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        main(["predict", "--help"])
    out = capsys.readouterr().out
    assert "accumulate:steps=N" in out and "quote a spec" in out
