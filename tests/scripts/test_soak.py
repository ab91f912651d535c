"""`lab soak`: short soaks over real Horovod and DDP through the command line, and what its judge must find."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from laboratory.loops import soak
from laboratory.loops.launches import launch
from laboratory.loops.soak import ENTRIES, SIZES, SPECS, Net, Plan
from laboratory.main import main

pytestmark = pytest.mark.slow

STEPS, RANKS, SEED = 60, 2, 5


@pytest.fixture(scope="module")
def reports() -> list[dict[str, Any]]:
    """What the ranks of a short soak over DDP report."""
    return launch("soak", RANKS, "ddp", SEED, STEPS)


def of_name(verdicts: list[soak.Verdict], name: str) -> soak.Verdict:
    return next(verdict for verdict in verdicts if verdict.name == name)


def test_a_short_soak_over_ddp_is_whole(reports: list[dict[str, Any]]) -> None:
    verdicts = {verdict.name: verdict.holds for verdict in soak.judge(Plan(SEED, STEPS), reports)}
    assert verdicts["replicas"] and verdicts["conservation"]
    assert len({line["spec"] for line in reports[0]["lines"]}) > 3 and reports[0]["lines"][-1]["step"] == STEPS


def test_a_short_soak_over_horovod(tmp_path: Path) -> None:
    pytest.importorskip("horovod.torch", reason="`lab soak --network horovod` was NOT tested: Horovod is not installed")
    settings = ["--steps", str(STEPS), "--ranks", "3", "--seed", str(SEED)]
    status = main(["soak", "--network", "horovod", *settings, "--out", str(tmp_path), "--name", "short"])
    record = json.loads((tmp_path / "soak-short.json").read_text())
    verdicts = {verdict["name"]: verdict["holds"] for verdict in record["networks"]["horovod"]["verdicts"]}
    assert status == 0 and verdicts["replicas"] and verdicts["conservation"], record
    assert record["command"].startswith(f"scripts/lab soak --network horovod --steps {STEPS}")


def test_a_lost_gradient_is_found(reports: list[dict[str, Any]]) -> None:
    """Of one rank in one step, in one layer; and at one entry."""
    plan, (first, second) = Plan(SEED, STEPS), reports
    lost = plan.gradient(STEPS // 2, 0, RANKS).nan_to_num(0, 0, 0)
    lost[: SIZES[0]] = lost[SIZES[0] + SIZES[1] :] = 0
    entry = torch.zeros(ENTRIES)
    entry[-100] = 0.5
    for fault in (lost, entry):
        found = of_name(soak.judge(plan, [first, {**second, "residual": second["residual"] - fault}]), "conservation")
        assert found.holds is False and "off by more than rounding" in found.said
    other = second["weights"].clone()
    other[7] = torch.nextafter(other[7], torch.tensor(torch.inf))
    found = of_name(soak.judge(plan, [first, {**second, "weights": other}]), "replicas")
    assert found.holds is False and "ranks [1] differ" in found.said


def logged(count: int = 1600, **changes: Any) -> list[dict[str, Any]]:
    """Make the log of one rank. changes: functions of the line's number, by figure."""
    steady = {"memory_kb": 300_000, "open_files": 20, "threads": 4, "cpu_ms": 10.0}
    return [
        {"step": 50 * (i + 1), "stretch": 0, "spec": SPECS[i // 5 % len(SPECS)]}
        | {key: changes[key](i) if key in changes else value for key, value in steady.items()}
        for i in range(count)
    ]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("memory_kb", {"memory_kb": lambda i: 300_000 + 12 * i}),
        ("open_files", {"open_files": lambda i: 20 + i // 500}),
        ("threads", {"threads": lambda i: 4 + i // 1200}),
        ("step time", {"cpu_ms": lambda i: 10 + i / 100}),
    ],
)
def test_what_grows_is_found(name: str, changes: Any) -> None:
    """12 kB of 50 steps, one file of 25,000 steps, a thread after 60,000, a step that takes twice as long after 50,000."""
    every = [*soak.flat_figures([logged()]), soak.step_time([logged()])]
    assert len(every) == 4 and all(verdict.holds for verdict in every)
    lines = [logged(**changes)]
    found = {verdict.name: verdict.holds for verdict in [*soak.flat_figures(lines), soak.step_time(lines)]}
    assert found == {verdict.name: verdict.name != name for verdict in every}


def test_short_soaks_are_not_judged() -> None:
    assert soak.step_time([logged(100)]).holds is None
    assert {verdict.holds for verdict in soak.flat_figures([logged(soak.LEAST_LINES - 1)])} == {None}


def test_the_plan_is_the_same_for_whoever_asks() -> None:
    first, second = Plan(3, 20_000), Plan(3, 20_000)
    steps = range(3000)
    assert [first.spec(step) for step in steps] == [second.spec(step) for step in steps]
    assert {first.spec(step) for step in range(250 * len(SPECS))} == set(SPECS)
    assert sum(first.overflow(step) is not None for step in steps) == 10
    for step in (0, 17, 251):
        torch.testing.assert_close(first.gradient(step, 1, 4), second.gradient(step, 1, 4), equal_nan=True, rtol=0, atol=0)
        assert not torch.equal(first.gradient(step, 1, 4), first.gradient(step, 2, 4))


def test_the_models_gradients_are_the_given_ones() -> None:
    model, drawn = Net(), Plan(1, 60).gradient(1, 0, 2)
    model(drawn).backward()
    grads = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    torch.testing.assert_close(grads, drawn, equal_nan=True, rtol=0, atol=0)


def test_one_rank_alone_cannot_be_left(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["soak", "--ranks", "1"]) == 2
    assert "--ranks 1 must be at least 2" in capsys.readouterr().err
