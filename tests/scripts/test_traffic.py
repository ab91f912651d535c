"""lab traffic: bytes split by origin, the curves of simulated ranks, and the interface of emulated hosts."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from laboratory.main import main
from laboratory.traffic import summary

LACKING = [
    tool for tool in ("ip", "tc") if not shutil.which(tool, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
]


def measured(payload: int, formula: int) -> dict[str, dict[str, float]]:
    """A rank whose hollow step sends 10 packets, 300 bytes beside them and 16 of its own."""
    shared = {"messages": 4, "framing": 576, "operations": 1, "seconds": 0.1}
    hollow = {"wire": 660 + 300 + 16, "packets": 10, "bytes": 16}
    return {"full": {"wire": 1320 + 300 + payload, "packets": 20, "bytes": formula, **shared}, "hollow": hollow | shared}


def test_measured_bytes_are_split_by_origin() -> None:
    rank = measured(1050, 1000)
    apart = summary.by_origin(rank["full"], rank["hollow"])
    assert apart == {"wire": 2670, "headers": 1320, "beside": 300, "payload": 1050, "formula": 1000}


def test_a_line_is_judged_by_the_rank_that_is_furthest() -> None:
    raw = {"idle": [{"wire": 100, "seconds": 0.2}] * 2, "specs": {"topk": [measured(1050, 1000), measured(880, 1000)]}}
    run = summary.summary(raw)
    (line,) = run["lines"]
    assert (run["ranks"], run["idle_bytes_per_cycle"]) == (2, round(500 * summary.CYCLE))
    assert line["ratio"] == pytest.approx(0.965) and line["furthest"] == pytest.approx(-0.12) and not line["within"]
    assert line["of_ranks"]["payload"] == [1050, 880]
    assert summary.table(run).splitlines()[-1].split()[-3:] == ["0.965", "-12.0%", "NO"]
    within = summary.line("topk", [measured(1050, 1000), measured(12, 0)])
    assert within["furthest"] == pytest.approx(0.05) and within["within"]  # of a rank without bytes: by the mean


def test_curves_end_where_memory_does(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = argparse.Namespace(size=2000, ranks=8, specs=["dense", "gtopk:ratio=0.01"])
    curves = summary.curves(chosen, lambda text: None)
    assert [point["ranks"] for point in curves["dense"]] == [2, 4, 8]
    assert curves["dense"][2]["bytes"] == {"most": 14_000, "mean": 14_000}
    assert curves["gtopk:ratio=0.01"][1]["operations"] == {"Send": 4}
    monkeypatch.setattr(summary, "MOST_ENTRIES", 8000)
    assert [point["ranks"] for point in summary.curves(chosen, lambda text: None)["dense"]] == [2, 4]


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="traffic on emulated hosts was NOT measured: it needs root")
@pytest.mark.skipif(bool(LACKING), reason=f"traffic on emulated hosts was NOT measured: {LACKING} missing, install iproute2")
def test_an_interface_sends_what_the_formula_says(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("horovod.torch", reason="traffic on emulated hosts was NOT measured: Horovod is not installed")
    out = tmp_path / "traffic-try.json"
    specs = "dense,topk:ratio=0.1,sketched_sgd:ratio=0.01"
    few = [
        "--hosts",
        "2",
        "--size",
        "100k",
        "--steps",
        "4",
        "--ranks",
        "4",
        "--specs",
        specs,
        "--name",
        "try",
        "--out",
        str(tmp_path),
    ]
    assert main(["traffic", *few]) == 0, capfd.readouterr().err
    result = json.loads(out.read_text())
    (run,) = result["runs"]
    for line in run["lines"]:
        simulated = {point["ranks"]: point["bytes"] for point in result["simulated"][line["spec"]]}
        assert simulated[2] == {"most": max(line["of_ranks"]["formula"]), "mean": line["formula"]}
        assert line["within"], line
    assert out.with_suffix(".png").stat().st_size > 0
    assert str(tmp_path) not in out.read_text()


def test_ranks_that_fail_leave_no_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = [sys.executable, "-c", "raise SystemExit(3)"]
    monkeypatch.setattr(summary.ranks, "command", lambda launcher, count, job, rate: broken)
    out = tmp_path / "traffic-try.json"
    assert main(["traffic", "--hosts", "2", "--name", "try", "--out", str(tmp_path)]) == 1
    assert not out.exists()
