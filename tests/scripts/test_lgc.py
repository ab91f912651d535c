"""lab lgc on few steps: phases with their bytes, and the redundancy between ranks."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from laboratory.commands import lgc
from laboratory.lgc import phases, redundancy
from laboratory.main import main


def test_every_phase_has_its_bytes_and_seconds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(phases, "DENSE", 2)
    monkeypatch.setattr(phases, "CODE", 3)
    monkeypatch.setattr(redundancy, "DENSE", 2)
    monkeypatch.setattr(lgc, "CONFIGURATIONS", (("topk", ""), ("lgc", "leader=rotate")))
    assert main(["lgc", "--learn", "3", "--steps", "22", "--ranks", "2", "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "lgc.json").read_text())
    topk, dense, learn, code = result["phases"]
    assert [row["phase"] for row in result["phases"]] == ["topk", "dense", "learn", "code"]
    assert [row["steps"] for row in result["phases"]] == [2, 2, 3, 3]
    assert dense["mean_bytes"] > learn["mean_bytes"] > topk["mean_bytes"] > code["other_bytes"]
    assert code["leader_bytes"] > code["other_bytes"] and topk["leader_bytes"] == topk["other_bytes"]
    assert learn["learning_seconds"] > 0 and code["learning_seconds"] == 0 and 0 < code["error"] < 2
    assert all(row["seconds"] > 0 for row in result["phases"])
    curves = result["redundancy"]["curves"]
    assert set(curves) == set(redundancy.CURVES)
    assert all(len(curve) == 20 and all(map(math.isfinite, curve)) for curve in curves.values())
    assert min(curves["correlation"]) >= -1 and max(curves["correlation"]) <= 1
    assert curves["mean_from_all"][-1] < curves["mean_from_all"][0]
    assert (tmp_path / "lgc-redundancy.png").stat().st_size > 10_000
    said = capsys.readouterr().out
    assert "leader's bytes" in said and "bits of a place" in said and str(tmp_path) in said
    assert str(tmp_path) not in json.dumps(result)


def test_places_take_few_bits() -> None:
    assert lgc.bits_of_places(25_557_032, 0.001, 16, 4) == pytest.approx(16, abs=0.2)


@pytest.mark.parametrize(
    ("given", "message"),
    [(["--steps", "20"], "--steps 20 must be above 30"), (["--ranks", "1"], "--ranks 1 must be at least 2")],
)
def test_too_few_steps_or_ranks_are_refused(given: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lgc", *given]) == 2
    assert message in capsys.readouterr().err
