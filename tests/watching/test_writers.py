"""Writers of records: files that were cut off, records that are changed, steps without seconds, a spec that changes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gradients

import gradcomp
from gradcomp import telemetry

DASHBOARD = Path(__file__).resolve().parents[2] / "examples" / "dashboard.py"
N = 5000


def train(simulation: gradcomp.Simulation, steps: int) -> list[int]:
    """Return the bytes of each step."""
    sent = []
    for step in range(steps):
        simulation.step([{"w": gradients.draw("heavy", N, step)}])
        sent += simulation.bytes_sent
    return sent


def watched(*writers: Any, spec: str = "topk:ratio=0.02", **options: Any) -> gradcomp.Simulation:
    simulation = gradcomp.Simulation(spec, {"w": (N,)}, 1)
    telemetry.watch(simulation, *writers, **options)
    return simulation


def test_a_line_that_was_cut_off_spoils_no_other(tmp_path: Path) -> None:
    """As by a full disk, or by the end of its rank. The training goes on, and so does the dashboard."""
    file = tmp_path / "rank-0.jsonl"
    train(watched(telemetry.JsonLines(tmp_path), every=2), 6)
    whole = file.read_text().splitlines()
    file.write_text(file.read_text()[:-100])
    train(watched(telemetry.JsonLines(tmp_path), every=2), 4)
    lines = file.read_text().splitlines()
    assert lines[:3] == [*whole[:2], whole[2][:-99]] and len(lines) == 5
    assert [json.loads(line)["step"] for line in lines[3:]] == [2, 4]
    drawn = subprocess.run([sys.executable, DASHBOARD, tmp_path, tmp_path / "a.png"], capture_output=True, text=True)
    assert drawn.returncode == 0, drawn.stderr


def test_a_writer_changes_nothing_for_the_next(tmp_path: Path) -> None:
    found: list[dict[str, Any]] = []

    def clear(record: dict[str, Any]) -> None:
        record["buckets"][0].clear()
        record.clear()

    train(watched(clear, found.append, every=1), 2)
    assert [record["step"] for record in found] == [1, 2] and found[1]["buckets"][0]["layers"] == ["w"]


def test_a_record_without_a_whole_step_has_no_seconds() -> None:
    """Seconds are from one step's end to the next one's: the first step of a training, or after a change, has none."""
    found: list[dict[str, Any]] = []
    simulation = watched(found.append, every=1)
    train(simulation, 2)
    simulation.change("topk:ratio=0.5")
    train(simulation, 2)
    assert [record["seconds"] is None for record in found] == [True, False, True, False]
    assert all(record["seconds"]["total"] > 0 for record in found if record["seconds"])


def test_bytes_are_of_the_record_s_own_spec() -> None:
    found: list[dict[str, Any]] = []
    simulation = watched(found.append, every=4)
    train(simulation, 2)
    simulation.change("topk:ratio=0.5")
    sent = train(simulation, 2)
    assert [record["bytes_sent"] for record in found] == [sum(sent) / 2]
