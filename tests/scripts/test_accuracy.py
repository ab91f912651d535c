"""lab accuracy: the plan, the arithmetic of seconds to a score, the page, and a small training on real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gradcomp import auto
from gradcomp.spec import LOSSES
from laboratory import machine, report
from laboratory.commands import accuracy
from laboratory.commands.accuracy import ADDED_UP, LAUNCHES, RATES, RECORDS, TRAININGS
from laboratory.harness import measured
from laboratory.harness.measured import Lab, Training
from laboratory.harness.ways import DDP, refuse
from laboratory.main import main
from laboratory.tasks.table import TASKS

EVERY, CLUSTERS = accuracy.trainings("mlp"), accuracy.launches("mlp")


def test_each_way_suits_its_door_is_trained_once_and_accumulation_with_several_rates() -> None:
    for launch in CLUSTERS:
        refuse(launch.ways, launch.door)
    for own in EVERY:
        refuse([own.way], own.door)
    assert {launch.hosts * launch.settings.batch for launch in CLUSTERS} == {4 * TASKS["mlp"].defaults.batch}
    every = [(own.way, own.settings.lr) for own in EVERY]
    assert len({*every}) == len(every) and [way for way, _ in every].count(ADDED_UP) == len(RATES)
    timed = {way for launch in CLUSTERS for way in launch.ways} - {"none", "auto", "auto:loss=high"}
    assert timed <= {way for way, _ in every}


@pytest.mark.parametrize(
    ("task", "curve", "wanted", "batches"),
    [
        ("mlp", [(10, 50.0), (20, 70.0), (30, 90.0)], 80.0, 25.0),
        ("mlp", [(10, 90.0), (20, 70.0)], 80.0, 10.0),
        ("mlp", [(10, 50.0), (20, 70.0)], 80.0, None),
        ("shakespeare", [(10, 9.0), (20, 5.0), (30, 4.0)], 6.0, 17.5),
        ("shakespeare", [(10, 9.0), (20, 7.0)], 6.0, None),
    ],
)
def test_batches_to_a_score(task: str, curve: accuracy.Curve, wanted: float, batches: float | None) -> None:
    assert accuracy.batches_to(task, curve, wanted) == batches


def test_the_goal_is_nearly_denses_end() -> None:
    assert accuracy.goal("mlp", [(10, 20.0), (20, 50.0)]) == pytest.approx(49.5)
    assert accuracy.goal("shakespeare", [(10, 20.0), (20, 9.9)]) == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("way", "curve"),
    [
        ("stock", "stock"),
        ("stock in bf16", "bf16"),
        ("dense", "stock"),
        ("orq:levels=9,momentum=0; dense in 1 layers; half in 12 layers", "orq:levels=9,momentum=0"),
        ("dense; orq:levels=5,momentum=0 in 2 layers", "orq:levels=5,momentum=0"),
        ("sdagc", "sdagc"),
        ("sdagc:by_host=true", "sdagc"),
        ("blocks:by_host=true", "blocks"),
        ("orq:levels=9,by_host=true,momentum=0", "orq:levels=9,momentum=0"),
    ],
)
def test_autos_curve_is_that_of_the_way_that_loses_most(way: str, curve: str) -> None:
    assert accuracy.chosen({"way": way}) == curve


@pytest.mark.parametrize("loss", LOSSES)
def test_every_way_of_auto_has_a_curve(loss: str) -> None:
    trained = {own.way for own in EVERY}
    for way in auto.candidates(loss, (torch.float32, torch.bfloat16), True, True):
        assert accuracy.chosen({"way": str(way)}) in trained


def test_auto_chooses_again_and_again() -> None:
    """After 300 batches, then after 600 more, then after 1200."""
    assert [accuracy.choices(batches) for batches in (1, 299, 301, 899, 901, 2101)] == [1, 1, 2, 2, 3, 4]


def keep(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep records as if they had been made: sdagc is worse by step, faster by second; blocks never gets there."""
    ends = {"blocks": 80.0, "sdagc": 98.5, "powersgd:rank=1": 50.0}

    def perform(own: measured.Measured, lab: Lab) -> dict[str, Any]:
        if not isinstance(own, Training):
            return {"lines": [line_of(way, own.rate) for way in own.ways]}
        end = ends.get(own.way, 99.0) - (own.settings.lr - 0.02 if own.way == ADDED_UP else 0)
        return {"scores": [(batch, batch / 100, end * batch / 600 + 0.5) for batch in range(100, 601, 100)]}

    monkeypatch.setattr(measured, "perform", perform)
    monkeypatch.setattr(machine, "origin", lambda command: {"command": command, "commit": "abc"})
    measured.complete(EVERY, folder / TRAININGS, Lab("made up", folder))
    measured.complete(CLUSTERS, folder / LAUNCHES, Lab("made up", folder))
    monkeypatch.undo()


def line_of(way: str, rate: str) -> dict[str, Any]:
    slow = rate == "100mbit"
    ms = {"none": 100.0, "stock": 500.0 if slow else 120.0, "sdagc": 110.0, "auto": 111.0, "auto:loss=high": 112.0}.get(
        way, 300.0
    )
    line: dict[str, Any] = {"way": way, "ms": {"median": ms, "low": ms, "high": ms}, "over": {}}
    if way.startswith("auto"):
        line["auto"] = {"way": "sdagc" if slow else "stock", "cost_seconds": 2.0}
    return line


def test_the_page_shows_seconds_and_what_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(tmp_path / "records", monkeypatch)
    monkeypatch.setattr(accuracy, "TRAINED", ["mlp"])
    chosen = ["--data", str(tmp_path), "--report"]
    places = ["--records", str(tmp_path / "records"), "--out", str(tmp_path / "out"), "--page", str(tmp_path / "page.md")]
    assert main(["accuracy", *chosen, *places]) == 0
    text = (tmp_path / "page.md").read_text()
    # Dense ends at 99.5, so that the goal is 98.505: after 594 batches of 0.5 or 0.12 s.
    assert "dense ends at 99.50 (accuracy in %), and 98.50 counts as reached" in text
    rows = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]]
        for line in text.splitlines()
        if line[:3] == "| `"
    }
    assert rows["`stock`, DDP"] == ["99.50", *["297 s", *["71 s"] * 3] * 2]
    # auto chooses twice in 596.9 batches, and each costs 2 s.
    assert rows["`sdagc`, DDP"] == ["99.00", *["**66 s**"] * 8]
    assert rows["`auto`, DDP"][1] == "70 s (sdagc)"
    assert rows["`blocks`, DDP"] == ["80.50", *["never (80.50)"] * 8]
    assert rows["`bf16:steps=4`, lr 0.02, DDP"][0] == "99.50"
    assert text.endswith("Commits: abc.\n")
    found = report.read(tmp_path / "out" / "accuracy.json")
    assert len(found["tasks"]["mlp"]["clusters"]) == 8
    assert str(tmp_path) not in (tmp_path / "out" / "accuracy.json").read_text()


def test_nothing_trained_gets_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["--data", str(tmp_path), "--report", "--page", str(tmp_path / "p.md")]
    assert main(["accuracy", *chosen, "--records", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert "cifar-large was not trained with stock DDP yet" in capsys.readouterr().err


def test_records_of_older_commits_are_read() -> None:
    """They give the figures that the committed result has of them; that of before November 2026 has predictions beside."""
    kept = report.read(RECORDS.with_suffix(".json"))["tasks"]
    for task in accuracy.TRAINED:
        found = accuracy.figures(task, RECORDS)
        assert (found["dense"], found["goal"]) == (kept[task]["dense"], kept[task]["goal"])
        lines = {(of["hosts"], of["rate"]): of["lines"] for of in kept[task]["clusters"]}
        for of in found["clusters"]:
            for line, same in zip(of["lines"], lines[of["hosts"], of["rate"]], strict=True):
                assert line == {name: value for name, value in same.items() if name != "predicted_ms"}
        assert len(found["clusters"]) == 8


@pytest.mark.slow
def test_a_training_on_real_ranks_scores_on_its_way(tmp_path: Path) -> None:
    settings = TASKS["mlp"].defaults._replace(steps=10, width=16)
    every = [Training("mlp", way, 0, 2, settings, DDP, 3) for way in ("stock", "dense", ADDED_UP, "none")]
    measured.complete(every, tmp_path, Lab("a test", tmp_path))
    stock, dense, added_up, apart = (measured.load(own, tmp_path) for own in every)
    assert stock and dense and added_up and apart
    assert [batch for batch, _, _ in stock["scores"]] == [6, 9, 10] and [batch for batch, _, _ in added_up["scores"]] == [4, 8]
    assert stock["scores"][-1][2] == pytest.approx(dense["scores"][-1][2])  # the same training
    assert (len(stock["losses"]), len(added_up["losses"])) == (10, 2)
    assert stock["weights_are_equal"] and not apart["weights_are_equal"]
    measured.complete(every, tmp_path, Lab("a test", tmp_path))
