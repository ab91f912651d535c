"""lab door: what DDP's door costs the host, over DDP's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from laboratory.main import main


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
