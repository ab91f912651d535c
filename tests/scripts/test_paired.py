"""The comparison of two checkouts' steps: its bounds, and a small run of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from paired import bounds  # noqa: E402


def test_bounds_hold_the_median_as_often_as_they_say() -> None:
    """Each side 95 times of 100, whatever the distribution: here the exponential's, whose median is ln 2."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.empty(4000, 40, dtype=torch.float64).exponential_(generator=generator).tolist()
    median = float(torch.tensor(2.0, dtype=torch.float64).log())
    low, high = zip(*map(bounds, draws), strict=True)
    for missed in (sum(value > median for value in low), sum(value < median for value in high)):
        assert 0.015 * 4000 < missed <= 0.05 * 4000 + 42  # three deviations of a count by chance


@pytest.mark.slow
def test_a_checkout_beside_itself(tmp_path: Path) -> None:
    out = tmp_path / "steps.json"
    sizes = ["--specs", "topk", "--layers", "1", "--pairs", "9", "--steps", "1", "--out", out]
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "paired.py", "--before", ROOT, *sizes], capture_output=True, text=True, check=True
    )
    found = json.loads(out.read_text())
    own = found["steps"]["topk"]
    assert own["low"] <= own["ratio"] <= own["high"] and own["pairs"] == 9
    assert f"ratio {own['ratio']:.3f}" in done.stdout
    assert str(ROOT) not in out.read_text()


def test_a_checkout_that_is_none_gets_its_own_message(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "paired.py", "--before", tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0 and "a worker ended with status 1; its message is above" in done.stderr
