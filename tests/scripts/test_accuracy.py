"""lab accuracy: the plan, the arithmetic of seconds to a score, the page, and a small training on real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gradcomp import auto
from gradcomp.spec import LOSSES
from laboratory import machine
from laboratory.commands import accuracy
from laboratory.commands.accuracy import ADDED_UP, LAUNCHES, RATES, TRAININGS, Plan
from laboratory.harness import measured
from laboratory.harness.measured import Lab, Training
from laboratory.harness.ways import DDP, HOROVOD, refuse
from laboratory.main import main
from laboratory.report import results
from laboratory.tasks.table import TASKS

PLAN = Plan(["mlp"], [4, 8], ["100mbit", "1gbit"], 2, {})


def test_every_way_suits_its_door() -> None:
    for launch in PLAN.launches():
        refuse(launch.ways, launch.door)
    for own in PLAN.trainings():
        refuse([own.way], own.door)


def test_all_clusters_train_with_the_same_batch() -> None:
    assert {launch.hosts * launch.settings.batch for launch in PLAN.launches()} == {4 * TASKS["mlp"].defaults.batch}


def test_each_way_is_trained_once_a_seed_and_accumulation_with_several_rates() -> None:
    every = [(course.seed, course.way, course.settings.lr) for course in PLAN.trainings()]
    assert len({*every}) == len(every)
    assert len([1 for seed, way, _ in every if way == ADDED_UP and seed == 0]) == len(RATES)
    timed = {way for launch in PLAN.launches() for way in launch.ways} - {"none", "auto", "auto:loss=high"}
    assert timed <= {way for _, way, _ in every}


@pytest.mark.parametrize(
    ("task", "curve", "wanted", "batches"),
    [
        ("mlp", [(10, 50.0), (20, 70.0), (30, 90.0)], 80.0, 25.0),
        ("mlp", [(10, 90.0), (20, 70.0)], 80.0, 10.0),
        ("mlp", [(10, 50.0), (20, 70.0)], 80.0, None),
        ("library", [(10, 9.0), (20, 5.0), (30, 4.0)], 6.0, 17.5),
        ("library", [(10, 9.0), (20, 7.0)], 6.0, None),
    ],
)
def test_batches_to_a_score(task: str, curve: accuracy.Curve, wanted: float, batches: float | None) -> None:
    assert accuracy.batches_to(task, curve, wanted) == batches


def test_the_goal_is_nearly_denses_end() -> None:
    assert accuracy.goal("mlp", [(10, 20.0), (20, 50.0)]) == pytest.approx(49.5)
    assert accuracy.goal("library", [(10, 20.0), (20, 9.9)]) == pytest.approx(10.0)


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
        ("orq:levels=9,by_host=true,momentum=0", "orq:levels=9,momentum=0"),
    ],
)
def test_autos_curve_is_that_of_the_way_that_loses_most(way: str, curve: str) -> None:
    assert accuracy.chosen({"way": way}) == curve


@pytest.mark.parametrize("loss", LOSSES)
def test_every_way_of_auto_has_a_curve(loss: str) -> None:
    trained = {way for _, way in PLAN.trained()}
    for way in auto.candidates(loss, (torch.float32, torch.bfloat16), True, True):
        assert accuracy.chosen({"way": str(way)}) in trained


def test_auto_chooses_again_and_again() -> None:
    """After 300 batches, then after 600 more, then after 1200."""
    assert [accuracy.choices(batches) for batches in (1, 299, 301, 899, 901, 2101)] == [1, 1, 2, 2, 3, 4]


def keep(plan: Plan, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep records as if they had been made: sdagc is worse by step, faster by second; ORQ-9 never gets there."""
    ends = {"orq:levels=9,momentum=0": 80.0, "sdagc": 98.5, "powersgd:rank=1": 50.0}

    def perform(own: measured.Measured, lab: Lab) -> dict[str, Any]:
        if not isinstance(own, Training):
            return {"lines": [line_of(way, own.rate) for way in own.ways]}
        end = ends.get(own.way, 99.0) - (own.settings.lr - 0.02 if own.way == ADDED_UP else 0)
        return {"scores": [(batch, batch / 100, end * batch / 600 + own.seed) for batch in range(100, 601, 100)]}

    monkeypatch.setattr(measured, "perform", perform)
    monkeypatch.setattr(machine, "origin", lambda command: {"command": command, "commit": "abc"})
    measured.complete(plan.trainings(), folder / TRAININGS, Lab("made up", folder))
    measured.complete(plan.launches(), folder / LAUNCHES, Lab("made up", folder))
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
    keep(PLAN, tmp_path / "records", monkeypatch)
    chosen = ["--tasks", "mlp", "--rate", "100mbit,1gbit", "--seeds", "2", "--data", str(tmp_path), "--report"]
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
    assert rows["`stock`, DDP"] == ["99.50", "297 s", "71 s", "297 s", "71 s"]
    # auto chooses twice in 596.9 batches, and each costs 2 s.
    assert rows["`sdagc`, DDP"] == ["99.00", *["**66 s**"] * 4]
    assert rows["`auto`, DDP"][1] == "70 s (sdagc)"
    assert rows["`orq:levels=9,momentum=0`, DDP"] == ["80.50", *["never (80.50)"] * 4]
    assert rows["`bf16:steps=4`, lr 0.02, DDP"][0] == "99.50"
    assert "4 hosts, 100 Mbit/s: `sdagc`, DDP takes 66 s, 0.37 of the 178 s of `bf16`, DDP" in text
    assert text.endswith("Commits: abc.\n")
    found = results.read(tmp_path / "out" / "accuracy.json")
    assert found is not None and len(found["tasks"]["mlp"]["clusters"]) == 4
    assert str(tmp_path) not in (tmp_path / "out" / "accuracy.json").read_text()


@pytest.mark.parametrize(
    ("own", "other", "said"),
    [
        (12.0, 10.0, "`sdagc`, Horovod takes 12 s, 1.20 of the 10 s of `stock`, DDP, **which wins**"),
        (12.0, None, "`sdagc`, Horovod takes 12 s; no other way does"),
        (None, 10.0, "`stock`, DDP takes 10 s; **no way of gradcomp does**"),
        (None, None, "no way reaches the goal"),
    ],
)
def test_a_cluster_on_which_others_win_and_ways_that_never_get_there_are_said(
    own: float | None, other: float | None, said: str
) -> None:
    lines = [{"door": DDP, "way": "stock", "seconds": other}, {"door": HOROVOD, "way": "sdagc", "seconds": own}]
    assert accuracy.verdict({"hosts": 4, "rate": "none", "lines": lines}) == f"- 4 hosts, unshaped: {said}"


def test_nothing_trained_gets_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["--tasks", "mlp", "--data", str(tmp_path), "--report", "--page", str(tmp_path / "p.md")]
    assert main(["accuracy", *chosen, "--records", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert "mlp was not trained with stock DDP yet" in capsys.readouterr().err


@pytest.mark.slow
def test_a_training_on_real_ranks_scores_on_its_way(tmp_path: Path) -> None:
    settings = TASKS["mlp"].defaults._replace(steps=10, width=16)
    every = [Training("mlp", way, 0, 2, settings, DDP, 3) for way in ("stock", "dense", ADDED_UP)]
    measured.complete(every, tmp_path, Lab("a test", tmp_path))
    stock, dense, added_up = (measured.load(own, tmp_path) for own in every)
    assert stock and dense and added_up
    assert [batch for batch, _, _ in stock["scores"]] == [6, 9, 10] and [batch for batch, _, _ in added_up["scores"]] == [4, 8]
    assert stock["scores"][-1][2] == pytest.approx(dense["scores"][-1][2])  # the same training
    assert (len(stock["losses"]), len(added_up["losses"])) == (10, 2) and stock["weights_are_equal"]
    measured.complete(every, tmp_path, Lab("a test", tmp_path))
