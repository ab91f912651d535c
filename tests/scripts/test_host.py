"""lab host and lab door: what a step costs beside its kernels and beside DDP, and the native calls that a bucket may make."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

import gradcomp
from gradcomp.engine.health import INTERVAL
from gradcomp.native import extension
from gradcomp.native.extension import MOST_PIECES
from laboratory.commands import host
from laboratory.commands.host import resnet50, shrunk
from laboratory.main import main

# Of gradients: accumulate; take and pack; add and settle; spread. Of updates: copy the weights, offer; take and pack; add and
# settle; deliver, wipe.
MOST_CALLS, MOST_CALLS_OF_UPDATES = 4, 6
# No residual's health is measured in them.
STEPS = 10
BUCKETS = 5


@pytest.mark.parametrize("spec", ["dense", "half", "blocks", "topk", "topk:momentum=0.9", "sdagc", "orq", "bingrad"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_a_bucket_makes_few_native_calls(spec: str, ranks: int, one_thread: None) -> None:
    assert host.SETTLING + STEPS < INTERVAL
    before = extension.native
    small = shrunk(resnet50(), host.SMALLER)
    found = host.steps(spec, small, host.BUCKET_MB / host.SMALLER, ranks, STEPS)
    most = MOST_CALLS_OF_UPDATES if gradcomp.make(spec).traits.acts_on_updates else MOST_CALLS
    assert found.buckets == BUCKETS and len(small) == 161
    assert 0 < sum(found.calls.values()) <= most * BUCKETS, found.calls
    assert not any(name.endswith("_scratch") for name in found.calls)  # sizes are asked for once
    assert extension.native is before


def test_the_table_and_the_record(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    threads, smaller = torch.get_num_threads(), shrunk(resnet50(), 100)
    monkeypatch.setattr(host, "resnet50", lambda: smaller)
    assert main(["host", "--specs", "topk;dense", "--ranks", "2", "--steps", "3", "--name", "try", "--out", str(tmp_path)]) == 0
    assert torch.get_num_threads() == threads
    result = json.loads((tmp_path / "host-try.json").read_text())
    topk, dense = result["lines"]
    assert topk["spec"] == "topk" and topk["calls"]["offer_progress"] == topk["calls"]["deliver_progress"] > 0
    assert dense["calls"]["flatten"] == topk["calls"]["flatten"] == math.ceil(161 / MOST_PIECES)
    for line in (topk, dense):
        assert 0 < line["python_ms"]["low"] <= line["python_ms"]["median"] <= line["python_ms"]["high"]
        assert line["binding_ms"]["low"] > 0 and line["kernels_ms"] >= 0
    text = capsys.readouterr().out
    assert "native calls a bucket" in text and "topk" in text


def test_the_doors_table_and_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["door", "--specs", "topk", "--rounds", "8", "--name", "try", "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "door-try.json").read_text())
    own, hook, topk = result["lines"]
    assert [each["way"] for each in (own, hook, topk)] == ["ddp", "fp16 hook", "topk"]
    assert topk["buckets"] == 4 and own["over"]["median"] == own["backward"]["over"]["median"] == 1
    for part in (topk, topk["backward"]):
        assert part["over"]["at_least"] <= part["over"]["median"] <= part["over"]["at_most"]
    assert topk["backward"]["ms"]["low"] < topk["ms"]["low"]
    assert len(result["settings"]["load"]) == 2
    assert "over DDP's own" in capsys.readouterr().out
