"""The comparison: what it launches and trains, its arithmetic on made-up figures, its refusals, and a small one, real."""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sklearn", reason="the comparison was NOT tested: scikit-learn is not installed")
pytest.importorskip("matplotlib", reason="the comparison was NOT tested: matplotlib is not installed")

from laboratory.commands import compare
from laboratory.compare import plan, steptimes, summary, tables
from laboratory.main import main
from laboratory.report import results
from laboratory.train import kept
from laboratory.train import launch as train

GS, GTOPK, SKETCHED = "gs_sgd:ratio=0.01", "gtopk:ratio=0.01", "sketched_sgd:ratio=0.01"
SPECS = ["dense", GTOPK, SKETCHED, GS]
SMALL = ["--hosts", "2", "--widths", "8,12", "--steps", "4", "--seeds", "2", "--ranks", "2", "--rounds", "2", "--turn", "0.01"]


def command(folder: Path, *more: str) -> list[str]:
    places = ["--cache", str(folder / "cache"), "--out", str(folder / "out"), "--name", "try"]
    return ["compare", *SMALL, "--jobs", "1", "--specs", ";".join(SPECS), *places, *more]


def a_plan(**changes: Any) -> plan.Plan:
    given = [*SMALL, "--specs", ";".join(SPECS), "--rate", "1gbit"]
    return compare.plan_of(parsed(given))._replace(**changes)


def parsed(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    compare.add_options(parser)
    return parser.parse_args(given)


def measured(launch: train.Launch, ms: dict[str, list[float]]) -> dict[str, Any]:
    """What a launch leaves behind, with these medians of its rounds."""
    raw = {
        "ranks": launch.hosts,
        "batch": launch.settings.batch,
        "parameters": 100,
        "bytes_dense": 400,
        "ways": {
            spec: {"rounds": [[value / 1000] for value in ms[spec]], "bytes": 8 * i, "loss": 1.0}
            for i, spec in enumerate(launch.ways)
        },
    }
    return {"commit": "abc", "run": train.summary(raw)}


ROUNDS = {"none": [10.0, 20.0], "dense": [300.0, 600.0], GTOPK: [26.0, 60.0], SKETCHED: [21.0, 42.0], GS: [20.0, 40.0]}


def test_specs_of_one_claim_share_a_launch() -> None:
    (launch,) = a_plan().launches(2, "1gbit", 8)
    assert launch.ways == ["none", GTOPK, SKETCHED, GS, "dense"]
    assert (launch.settings.batch, launch.settings.momentum) == (8, 0.9)
    needed = plan.bytes_needed(2, 8, 3)
    first, second = a_plan(memory=needed / 1e9 + 1e-6).launches(2, "1gbit", 8)
    assert (first.ways, second.ways) == (["none", GTOPK, SKETCHED], ["none", GS, "dense"])
    assert [launch.ways[1:] for launch in a_plan(memory=1e-9).launches(2, "1gbit", 8)] == [
        [GTOPK],
        [SKETCHED],
        [GS],
        ["dense"],
    ]


def test_models_have_the_sizes_that_are_promised() -> None:
    assert [round(plan.parameters(width) / 1e6, 1) for width in (2048, 3520)] == [8.5, 25.1]


def test_peers_send_the_same_share() -> None:
    specs = [*SPECS, "gtopk:ratio=0.02,momentum=0.9"]
    assert plan.peer(GS, "gtopk", specs) == GTOPK
    assert plan.peer("topk:ratio=0.02", "gtopk", specs) == specs[-1]
    assert plan.peer("topk:ratio=0.3", "gtopk", specs) is None
    assert plan.peer("dense", "gtopk", specs) == GTOPK


@pytest.mark.parametrize("memory", [17.0, 1e-9])
def test_throughput_is_compared_within_rounds_also_between_launches(memory: float) -> None:
    launches = a_plan(memory=memory).launches(2, "1gbit", 8)
    timed = steptimes.together([measured(launch, ROUNDS) for launch in launches])
    assert timed.keys() == ROUNDS.keys()
    assert timed[GS].ms == (30, 20, 40)
    assert steptimes.throughput(timed[GS], timed[GTOPK]) == pytest.approx((1.4, 1.3, 1.5))


def test_claims_are_judged_on_each_cluster() -> None:
    timed = steptimes.together([measured(launch, ROUNDS) for launch in a_plan().launches(2, "1gbit", 8)])
    one = summary.model(a_plan(), 8, [timed], {})
    assert [(claim["against"], claim["at_least"], claim["holds"]) for claim in one["claims"]] == [
        (GTOPK, 1.3, True),
        (SKETCHED, 1.1, False),
    ]
    assert [tables.verdict(claim) for claim in one["claims"]] == ["holds: 1.40 x", "does not hold: 1.05 x"]
    said = tables.markdown(one, 4)
    assert "| `gs_sgd:ratio=0.01`: 1.1 x the throughput of `sketched_sgd:ratio=0.01` | does not hold: 1.05 x |" in said
    assert "| `dense` | 450 | 32 |" in said
    assert "| `gs_sgd:ratio=0.01` | 1.40 / 1.05 |" in said


def record(losses: list[float]) -> dict[str, Any]:
    sent = {"sent": [4] * len(losses), "dense_bytes": 400 * len(losses)}
    return {"score": 90.0, "losses": losses, "seconds": 1.0, "commit": "abc", **sent}


def test_seconds_are_steps_times_the_step() -> None:
    falling, slow = [100.0 - step for step in range(1, 101)], [60.0] * 100  # dense is at 24.5 after 80 of its steps, smoothed
    later = [max(losses, 0.0) for losses in (110.0 - step for step in range(1, 101))]
    records = {
        "dense": {seed: record(falling) for seed in range(3)},
        GTOPK: {0: record(slow), 1: record([value + 2 for value in slow])},
        GS: {seed: record(later) for seed in range(3)},
    }
    timed = steptimes.together([measured(launch, ROUNDS) for launch in a_plan().launches(2, "1gbit", 8)])
    dense, gtopk, gs = summary.model(a_plan(), 8, [timed], records)["training"]
    assert (dense["steps_to_loss"], dense["seconds_to_loss"]) == (80, [pytest.approx(80 * 0.45)])
    assert (gs["steps_to_loss"], gs["seconds_to_loss"]) == (90, [pytest.approx(90 * 0.03)])
    assert (gtopk["steps_to_loss"], gtopk["seconds_to_loss"]) == (None, [None])
    assert (gtopk["loss"], gtopk["loss_error"]) == (61, 1)
    assert [line["steps_to_common"] for line in (dense, gtopk, gs)] == [44, 1, 54]  # down at 61, which gtopk never leaves
    assert gs["seconds_to_common"] == [pytest.approx(54 * 0.03)]
    assert gtopk["curve"]["error"] == [1] * summary.POINTS
    assert gs["curve"]["step"][-1] == 100


def test_a_spec_that_diverges_counts_as_far_as_it_came() -> None:
    curves = {"dense": [2.0, 1.0], GS: [2.0, math.nan]}
    records = {spec: {seed: record(curve) for seed in (0, 1)} for spec, curve in curves.items()}
    dense, gs = summary.training_of(records, [])
    assert (dense["loss"], dense["common_loss"], gs["loss"], gs["steps_to_common"]) == (1.5, 2, None, 1)


def test_without_two_seeds_of_dense_nothing_is_said_of_training() -> None:
    records: dict[str, dict[int, Any]] = {"dense": {0: record([1.0])}, GS: {0: record([1.0]), 1: record([1.0])}}
    assert summary.training_of(records, []) == []


def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[train.Launch]:
    """Launches are listed instead of performed."""
    made: list[train.Launch] = []

    def perform(launch: train.Launch, where: str, *folders: Path | None) -> dict[str, Any]:
        made.append(launch)
        run: dict[str, Any] = measured(launch, ROUNDS)["run"]
        return run

    monkeypatch.setattr(train, "perform", perform)
    return made


def test_a_comparison_continues_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = stand_in(monkeypatch)
    assert main(command(tmp_path, "--rate", "1gbit")) == 0
    said = capsys.readouterr().out
    assert "step times: 2 launches, 0 of them finished" in said
    assert "launch 2 of 2" in said
    assert "training: 16 runs, 0 of them" in said
    assert len(made) == 2
    folder = tmp_path / "out"
    for name in ("8.png", "12.png", "times.png"):
        assert (folder / f"compare-try-{name}").read_bytes().startswith(b"\x89PNG")
    text = (folder / "compare-try.json").read_text()
    assert str(tmp_path) not in text
    result = json.loads(text)
    assert {"command", "date", "commit", "machine", "versions", "settings"} <= result.keys()
    assert [len(model["claims"]) for model in result["models"]] == [2, 2]

    monkeypatch.setattr(compare.plots, "losses", lambda plan, model, path: None)
    monkeypatch.setattr(compare.plots, "times", lambda models, path: None)
    next((tmp_path / "cache" / "compare").glob("*.json")).unlink()
    next((tmp_path / "cache" / "study").glob("*.json")).unlink()
    assert main(command(tmp_path, "--rate", "1gbit")) == 0
    said = capsys.readouterr().out
    assert "2 launches, 1 of them" in said
    assert "16 runs, 15 of them" in said
    assert len(made) == 3

    (folder / "compare-try.json").unlink()
    assert main(["compare", "--report", "--name", "try", "--cache", str(tmp_path / "cache"), "--out", str(folder)]) == 0
    assert json.loads((folder / "compare-try.json").read_text())["models"][0]["claims"] == result["models"][0]["claims"]


def test_a_report_is_made_of_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = parsed(command(tmp_path, "--rate", "1gbit,100mbit")[1:])
    made = compare.plan_of(chosen)
    plan_path = tmp_path / "cache" / "compare" / "plans" / "try.json"
    results.write(plan_path, {"command": "scripts/lab compare", "plan": made._asdict()})
    at = ["compare", "--report", "--name", "try", "--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "out")]
    assert main(at) == 1
    assert "nothing is measured or trained yet" in capsys.readouterr().err
    (launch,) = made.launches(2, "100mbit", 12)
    results.write(kept.file_of(launch, tmp_path / "cache" / "compare"), measured(launch, ROUNDS))
    assert main(at) == 0
    said = capsys.readouterr().out
    assert "| spec | 2 hosts, 100mbit |" in said
    assert "Training" not in said


def test_finished_launches_outlive_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = stand_in(monkeypatch)
    whole = train.perform

    def interrupted(launch: train.Launch, where: str, *folders: Path | None) -> dict[str, Any]:
        if made:
            raise KeyboardInterrupt
        return whole(launch, where, *folders)

    monkeypatch.setattr(train, "perform", interrupted)
    assert main(command(tmp_path, "--rate", "1gbit,100mbit")) == 130
    assert len(list((tmp_path / "cache" / "compare").glob("*.json"))) == 1


def test_impossible_comparisons_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(command(tmp_path, "--steps", "4,5,6")) == 2
    assert "--steps has 3 numbers, but --widths 2" in capsys.readouterr().err
    assert main(["compare", "--report", "--name", "other", "--cache", str(tmp_path)]) == 2
    assert "no comparison is named 'other'" in capsys.readouterr().err
    monkeypatch.setattr(steptimes.machine, "memory_available", lambda: 1e8)
    assert main(command(tmp_path)) == 2
    assert "lower --memory" in capsys.readouterr().err


def test_ranks_that_fail_end_the_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train, "command", lambda *launch: [sys.executable, "-c", "raise SystemExit(3)"])
    assert main(command(tmp_path)) == 1
    assert "lab compare: the ranks of 2 hosts, 1gbit, mlp by horovod, width 8 failed with status 3" in capsys.readouterr().err
