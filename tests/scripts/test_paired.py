"""The comparison of two checkouts' steps: its bounds, and a small run of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from laboratory.commands.paired import bounds
from laboratory.main import main

ROOT = Path(__file__).resolve().parents[2]


def test_bounds_hold_the_median_as_often_as_they_say() -> None:
    """Each side 95 times of 100, whatever the distribution: here the exponential's, whose median is ln 2."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.empty(4000, 40, dtype=torch.float64).exponential_(generator=generator).tolist()
    median = float(torch.tensor(2.0, dtype=torch.float64).log())
    low, high = zip(*map(bounds, draws), strict=True)
    for missed in (sum(value > median for value in low), sum(value < median for value in high)):
        assert 0.015 * 4000 < missed <= 0.05 * 4000 + 42  # three deviations of a count by chance


@pytest.mark.slow
def test_a_checkout_beside_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--specs", "topk", "--layers", "1", "--pairs", "5", "--steps", "1"]
    assert main(["paired", "--before", str(ROOT), *small, "--name", "try", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "paired-try.json").read_text()
    own = json.loads(text)["steps"]["topk"]
    assert own["low"] <= own["ratio"] <= own["high"] and own["pairs"] == 5
    assert f"{own['ratio']:.3f}" in capsys.readouterr().out
    assert str(ROOT) not in text


def test_a_folder_without_a_checkout_gets_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paired", "--before", str(tmp_path)]) == 2
    assert f"the worker of {tmp_path.name} ended with status 1; its message is above" in capsys.readouterr().err
