"""The comparison of two checkouts' steps: its bounds, and a small run of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from clusters import need_cluster

from laboratory.commands.paired import worker
from laboratory.main import main
from laboratory.options import Refused
from laboratory.timing import median_bounds

ROOT = Path(__file__).resolve().parents[2]


def test_bounds_hold_the_median_as_often_as_they_say() -> None:
    """Each side 95 times of 100, whatever the distribution: here the exponential's, whose median is ln 2."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.empty(4000, 40, dtype=torch.float64).exponential_(generator=generator).tolist()
    median = float(torch.tensor(2.0, dtype=torch.float64).log())
    low, high = zip(*map(median_bounds, draws), strict=True)
    for missed in (sum((value or 0) > median for value in low), sum((value or 0) < median for value in high)):
        assert 0.015 * 4000 < missed <= 0.05 * 4000 + 42  # three deviations of a count by chance
    assert median_bounds([1.0, 2.0, 3.0, 4.0, 5.0]) == (1, 5) and median_bounds([1.0, 2.0, 3.0, 4.0]) == (None, None)
    assert median_bounds([float(i) for i in range(20, 0, -1)]) == (6, 15)  # 15 heads of 20: 2.1 %; 14: 5.8 %


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [[], pytest.param(["--hosts", "2"], marks=pytest.mark.long)])
def test_a_checkout_beside_itself(hosts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if hosts:
        need_cluster()
    small = ["--specs", "topk", "--layers", "1", "--pairs", "5", "--steps", "1", *hosts]
    assert main(["paired", "--before", str(ROOT), *small, "--name", "try", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "paired-try.json").read_text()
    own = json.loads(text)["steps"]["topk"]
    assert own["low"] <= own["ratio"] <= own["high"] and own["pairs"] == 5
    assert f"{own['ratio']:.3f}" in capsys.readouterr().out
    assert str(ROOT) not in text


@pytest.mark.parametrize("side", ["--before", "--after"])
def test_a_folder_without_a_built_checkout_is_refused(side: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "unbuilt" / "gradcomp").mkdir(parents=True)
    (tmp_path / "unbuilt" / "gradcomp" / "__init__.py").touch()
    no_checkout = "is not a checkout of gradcomp: it has no gradcomp/__init__.py"
    unbuilt = "has no built gradcomp/_native*.so; run scripts/setup there"
    for folder, message in ((tmp_path, no_checkout), (tmp_path / "missing", no_checkout), (tmp_path / "unbuilt", unbuilt)):
        with pytest.raises(SystemExit) as ended:
            main(["paired", "--before", str(ROOT), side, str(folder)])
        assert ended.value.code == 2
        assert f"argument {side}: {str(folder)!r} {message}" in capsys.readouterr().err


def test_a_worker_measures_its_own_checkout_only(capfd: pytest.CaptureFixture[str]) -> None:
    message = f"the worker of {ROOT.parent.name} ended with status 1; its message is above"
    with pytest.raises(Refused, match=message), worker(ROOT.parent, "topk", 1):
        pass
    assert f"instead of the gradcomp in {ROOT.parent}" in capfd.readouterr().err
