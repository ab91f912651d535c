"""lab layers: ratios within rounds, and a launch of real ranks by every door."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from laboratory.commands import layers
from laboratory.main import main


def times(*wall: float) -> list[dict[str, float]]:
    return [{"wall": each, "processor": each / 2} for each in wall]


def test_ratios_are_taken_within_rounds() -> None:
    found = layers.summary({"": times(0.5, 0.25, 0.5), "topk": times(1.0, 0.375, 0.5)})
    assert found["topk"]["ratio"]["wall"] == {"median": 1.5, "low": 1.0, "high": 2.0}
    assert found["topk"]["ms"]["processor"]["median"] == 250 and found["alone"]["ratio"]["processor"]["high"] == 1
    assert "1.00..2.00" in layers.table({"ddp": found})


@pytest.mark.long
def test_every_door_is_timed(tmp_path: Path) -> None:
    small = ["--layers", "20", "--rounds", "2", "--steps", "2", "--specs", "topk;orq", "--optimizer", "adamw"]
    assert main(["layers", *small, "--out", str(tmp_path), "--name", "a"]) == 0
    result = json.loads((tmp_path / "layers-a.json").read_text())
    assert set(result["doors"]) == {"compression", "optimizer", "ddp"} and result["settings"]["layers"] == 20
    for lines in result["doors"].values():
        assert list(lines) == ["alone", "topk", "orq"]
        assert all(line["ms"]["wall"]["low"] > 0 for line in lines.values())
