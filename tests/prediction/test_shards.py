"""A prediction of FSDP2: its bytes are those of real ranks, and it says what to use, and what it leaves out and why."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import join, launch, once
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import gradcomp
import gradcomp.fsdp
from gradcomp.core.requests import World
from gradcomp.prediction import measure, recording_network, shards
from gradcomp.prediction.recording_network import RecordingNetwork

RANKS = 4
TIMES: dict[str, Any] = {"forward_time": 0.01, "backward_time": 0.02, "fsdp": True}
SHAPES = {"embedding": (80, 100), "blocks.0.a": (300, 100), "blocks.0.b": (100,), "blocks.1.a": (300, 100), "norm": (10,)}
GRADIENTS, WEIGHTS = ("blocks", "half", "orq:levels=5"), ("blocks:bits=8", "blocks:bits=5")


class Block(nn.Module):
    """Layers that four shards do not divide evenly, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(50, 141), nn.LayerNorm(141)
        self.down = nn.Linear(141, 50, bias=False).requires_grad_(False)

    def forward(self, batch: Tensor) -> Tensor:
        hidden: Tensor = batch + self.down(self.norm(self.up(batch)))
        return hidden


class Net(nn.Module):
    """Two blocks, and layers of the model's own around them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(30, 50), nn.Linear(50, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, batch: Tensor) -> Tensor:
        hidden = self.first(batch)
        for block in self.blocks:
            hidden = block(hidden)
        result: Tensor = self.last(hidden)
        return result


def program() -> dict[str, tuple[int, int]]:
    """Return the bytes of gradients, and of weights, that a rank sends in a step."""
    join()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh, found = init_device_mesh("cpu", (RANKS,)), {}
    for gradients, weights in itertools.product(GRADIENTS, WEIGHTS):
        model: Any = Net()
        for each in (*model.blocks, model):
            fully_shard(each, mesh=mesh, mp_policy=policy)
        handle = gradcomp.fsdp.attach(model, f"{gradients},momentum=0" if "orq" in gradients else gradients, weights=weights)
        for _ in range(2):
            model(torch.randn(6, 30)).sum().backward()
        found[f"{gradients} weights={weights}"] = handle.stats()["bytes_sent"], handle.stats()["weight_bytes_sent"]
    return found


@once
def launched() -> dict[str, tuple[int, int]]:
    return launch(program, RANKS)[0]


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every part of a step take 0.2 ms, so that no figure depends on a clock."""
    ticks = itertools.count()
    monkeypatch.setattr(measure, "SECONDS", 0.0)
    monkeypatch.setattr(recording_network, "time", SimpleNamespace(perf_counter=lambda: 2e-4 * next(ticks)))


@pytest.mark.parametrize("way", [f"{gradients} weights={weights}" for gradients in GRADIENTS for weights in WEIGHTS])
def test_the_bytes_are_those_that_ranks_send(way: str) -> None:
    """The rest is 454 entries of bfloat16, which the recording network pads to 912 bytes, for each of three others."""
    assert gradcomp.predict(Net(), RANKS, specs=way, **TIMES)[way].bytes == sum(launched()[way]) + 3 * (912 - 2 * 454)


def test_torchs_own_exchange_gathers_twice_and_reduces_once_but_for_the_rest() -> None:
    """Each rank sends its parts to the others, in a ring. The rest keeps its weights between forward and backward."""
    found = gradcomp.predict(SHAPES, RANKS, specs=["half", "none weights=bf16"], **TIMES)
    of_blocks, rest = 2 * 300 * 100 + 100, 80 * 100 + 12  # 10 entries are 12 on four ranks
    for way, of_weight, of_gradient in (("stock", 4, 4), ("stock weights=bf16", 2, 4), ("bf16 weights=bf16", 2, 2)):
        wanted = (of_weight * (2 * of_blocks + rest) + of_gradient * (of_blocks + rest)) * 3 // 4
        assert found[way].bytes == pytest.approx(wanted, rel=1e-3), way
    assert found["half"].bytes == pytest.approx((4 * (2 * of_blocks + rest) + 2 * (of_blocks + rest)) * 3 / 4, rel=0.01)
    assert found["none"].seconds == pytest.approx(0.03) and not found["none"].bytes
    assert "none weights=bf16" in found.left_out
    table = {line.split("  ")[0]: line.split()[-2:] for line in str(found).splitlines()}
    assert table["stock"] == ["1.0", "x"] and table["bf16 weights=bf16"] == ["2.0", "x"]  # of plain FSDP2


def test_a_model_in_bfloat16_and_one_rank() -> None:
    half = gradcomp.predict(nn.Sequential(nn.Linear(100, 100)).bfloat16(), 4, specs="blocks", **TIMES)
    assert half["stock"].bytes == half["bf16 weights=bf16"].bytes
    alone = gradcomp.predict(SHAPES, 1, specs="blocks weights=blocks:bits=8", **TIMES)
    assert {line.bytes for line in alone.lines} == {0} and not alone["stock"].waiting


def test_modules_are_the_parts_of_lists_and_the_rest() -> None:
    names = ["wte.weight", "h.0.mlp.0.weight", "h.0.mlp.1.weight", "h.10.bias", "conv1.weight", "norm.weight"]
    assert shards.modules_of(names) == {
        "": ["wte.weight", "conv1.weight", "norm.weight"],
        "h.0": ["h.0.mlp.0.weight", "h.0.mlp.1.weight"],
        "h.10": ["h.10.bias"],
    }
    assert shards.modules_of(["0.weight", "2.weight"]) == {"0": ["0.weight"], "2": ["2.weight"]}


def test_equal_modules_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    acts_of = shards._acts_of
    monkeypatch.setattr(shards, "_acts_of", lambda form, *rest: (made.append(form), acts_of(form, *rest))[1])
    layers = dict.fromkeys(("first", "last", *(f"blocks.{i}.w" for i in range(9))), ((40, 40), True, torch.float32))
    found = shards.measure_shards("stock", layers, RecordingNetwork(World(0, 4), torch.device("cpu")))
    assert [len(form) for form in made] == [2, 1] and [each.resharded for each in found] == [False] + 9 * [True]
    assert found[1:] == 9 * [found[1]] and sum(each.share for each in found) == pytest.approx(1)


def test_the_advice_knows_bfloat16_weights_and_those_in_few_bits() -> None:
    way = "blocks weights=blocks:bits=6"
    slow, fast = (gradcomp.predict(SHAPES, 4, link=link, specs=[way], **TIMES) for link in ("10Mbit/s", "4000Gbit/s"))
    assert slow.advice.startswith(f"{way}: ") and "x as bf16 weights=bf16" in slow.advice
    assert fast.advice.startswith(f"stay dense: the fastest spec, {way}, would be 0.")
    assert "FSDP2 on CPUs, where nothing overlaps" in str(slow)
    links = ("10Mbit/s", "1Gbit/s")
    slow, middle = (gradcomp.predict(SHAPES, 4, link=link, latency="1us", specs=["topk"], **TIMES) for link in links)
    assert (
        slow.advice.startswith("take bfloat16 for weights and gradients: ")
        and "No spec for every step was predicted" in slow.advice
    )
    # Gradients in bfloat16 would be a little faster, which is not worth their sums in it.
    assert middle.advice.startswith("stay with bfloat16 weights: ")
    assert middle["bf16 weights=bf16"].seconds < middle["stock weights=bf16"].seconds


def test_what_acts_over_no_shards_is_left_out_with_its_reason() -> None:
    found = gradcomp.predict(SHAPES, 4, specs=["topk", "topk:clip=1", "blocks; *.bias=dense", "accumulate:steps=4"], **TIMES)
    assert [line.spec for line in found.lines] == ["none", "stock", "stock weights=bf16", "bf16 weights=bf16"]
    assert "left out: topk, blocks; *.bias=dense: it cannot act over shards" in str(found)
    assert "clip_grad_norm_()" in found.left_out["topk:clip=1"] and "accumulation" in found.left_out["accumulate:steps=4"]
    every = shards.every_way()
    assert {"blocks weights=bf16", "half weights=bf16", "blocks weights=blocks:bits=8"} <= {*every}
    assert all(shards.why_not(way) is None for way in every) and "topk weights=bf16" not in every


@pytest.mark.parametrize(
    "change,said",
    [
        ({"specs": ["blocks weights=topk"]}, "weights= got topk; weights travel as blocks"),
        ({"specs": ["blocks weights=float8"]}, "there is no compressor 'float8'"),
        ({"specs": ["nothing weights=bf16"]}, "there is no compressor 'nothing'"),
        ({"specs": ["auto"]}, "auto"),
        ({"hosts": 3}, "4 ranks cannot be spread evenly over 3 hosts"),
        ({"bucket_mb": 25}, "bucket_mb= is for DDP, and FSDP2 reduces module by module"),
    ],
)
def test_bad_input_gets_a_sentence(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        gradcomp.predict(SHAPES, 4, **{**TIMES, **change})


def test_the_command_predicts_fsdp2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from gradcomp.__main__ import main

    (tmp_path / "shapes.json").write_text(json.dumps({"blocks.0.w": [100, 100]}))
    words = ["predict", "--fsdp", "--model", str(tmp_path / "shapes.json"), "--ranks", "4", "--forward", "1ms"]
    main([*words, "--backward", "2ms", "--specs", "blocks weights=blocks:bits=8"])
    assert "\nblocks weights=blocks:bits=8  " in capsys.readouterr().out


def test_the_page_holds_the_records() -> None:
    root = Path(__file__).parents[2]
    read = lambda name: json.loads((root / f"benchmarks/results/{name}.json").read_text())  # noqa: E731
    made, done = read("predictions-fsdp"), read("train-fsdp-weights")
    measured = {(run["rate"], line["way"]): line["ms"]["median"] for run in done["runs"] for line in run["lines"]}
    page = (root / "benchmarks/step-times.md").read_text()
    assert len(made["lines"]) == 24
    for line in made["lines"]:
        assert f" {line['predicted_ms']:,} / {measured[line['rate'], line['way']]:,.0f} (" in page, line
