"""Tables, progress, result files and pictures of the laboratory."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from laboratory.refusal import Refused
from laboratory.report import progress, results, tables


def test_a_table_is_aligned() -> None:
    rows = [("", "ms"), ("copy_", "1.5"), ("a", "10")]
    assert tables.columns(rows).splitlines() == ["        ms", "-" * 10, "copy_  1.5", "a       10"]
    assert tables.markdown(rows).splitlines() == ["|  | ms |", "|---|--:|", "| copy_ | 1.5 |", "| a | 10 |"]


def test_a_missing_figure_is_named() -> None:
    assert [tables.figure(value, "{:.1f}", "never") for value in (1.25, None)] == ["1.2", "never"]
    assert [tables.milliseconds(seconds) for seconds in (2.0, 0.02, 0.002, 0.0002)] == ["2000", "20.0", "2.00", "0.2000"]


def test_progress_comes_in_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    shown = progress.Progress()
    for step in range(1, 5):
        shown(f"step {step}", step / 4)
    assert [line.split()[:2] for line in capsys.readouterr().err.splitlines()] == [["step", "4"]]


def test_a_result_file_names_its_origin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = argparse.Namespace(subcommand="kernels", command="scripts/lab kernels", name=None, out=tmp_path)
    path = results.path_of(chosen, "cpu-x")
    results.save(chosen, path, {"lines": []})
    found = json.loads((tmp_path / "kernels-cpu-x.json").read_text())
    assert list(found) == ["what", "command", "date", "commit", "machine", "versions", "lines"]
    assert str(path) in capsys.readouterr().out
    chosen.name = "mine"
    assert results.path_of(chosen, "cpu-x", ".png").name == "kernels-mine.png"
    assert results.path_of(argparse.Namespace(subcommand="confirm", name=None, out=tmp_path), None).name == "confirm.json"


def test_a_broken_file_of_finished_work_is_named(tmp_path: Path) -> None:
    assert results.read(tmp_path / "absent.json") is None
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(Refused, match=r"run\.json in .* is not JSON; delete it"):
        results.read(tmp_path / "run.json")
