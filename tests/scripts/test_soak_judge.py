"""The judge of `lab soak` on records that are made up: what grows is found; and the plan, which all sides draw alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from laboratory.main import main
from laboratory.soak import judge
from laboratory.soak.plan import SPECS, Net, Plan


def logged(count: int = 1600, **changes: Any) -> list[dict[str, Any]]:
    """Make the log of one process. changes: functions of the line's number, by figure."""
    steady = {"rss_kb": 300_000, "fds": 20, "threads": 4, "cpu_ms": 10.0, "wall_ms": 12.0}
    lines: list[dict[str, Any]] = [{"pid": 1, "time": 0.0, "begins": 0, "ranks": 4}]
    for i in range(count):
        own = {key: changes[key](i) if key in changes else value for key, value in steady.items()}
        lines.append({"pid": 1, "time": 1.0 + i, "step": 50 * (i + 1), "ranks": 4, "spec": SPECS[i // 5 % len(SPECS)], **own})
    return lines


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("memory", {"rss_kb": lambda i: 300_000 + 12 * i}),
        ("open files", {"fds": lambda i: 20 + i // 500}),
        ("threads", {"threads": lambda i: 4 + i // 1200}),
        ("step time", {"cpu_ms": lambda i: 10 + i / 100}),
    ],
)
def test_what_grows_is_found(name: str, changes: Any) -> None:
    """12 kB of 50 steps, one file of 25,000 steps, a thread after 60,000, a step that takes twice as long after 50,000."""
    every = [*judge.flat(logged()), judge.step_time(logged(), [])]
    assert len(every) == 4 and all(verdict.holds for verdict in every)
    lines = logged(**changes)
    found = {verdict.name: verdict.holds for verdict in [*judge.flat(lines), judge.step_time(lines, [])]}
    assert found == {verdict.name: verdict.name != name for verdict in every}


def test_times_of_trouble_and_short_soaks_are_not_judged() -> None:
    lines = logged(cpu_ms=lambda i: 1000.0 if i >= 800 else 10.0)
    assert judge.step_time(lines, []).holds is False
    every_second = logged(cpu_ms=lambda i: 1000.0 if i % 2 and i >= 800 else 10.0)
    killed = [{"time": 1.5 + i, "kind": "kill"} for i in range(0, 1600, 2)]
    assert judge.step_time(every_second, killed).holds and not judge.step_time(every_second, []).holds
    assert judge.step_time(logged(100), []).holds is None
    assert {verdict.holds for verdict in judge.flat(logged(judge.LEAST_LINES - 1))} == {None}


def test_the_plan_is_the_same_for_whoever_asks() -> None:
    first, second = Plan(3, 20_000), Plan(3, 20_000)
    steps = range(3000)
    assert [first.spec(step) for step in steps] == [second.spec(step) for step in steps]
    assert {first.spec(step) for step in range(250 * len(SPECS))} == set(SPECS)
    assert sum(first.overflow(step) is not None for step in steps) == 10
    assert sum(first.spike(step) is not None for step in steps) == 48
    for step in (0, 17, 251):
        torch.testing.assert_close(first.gradient(step, 1, 4), second.gradient(step, 1, 4), equal_nan=True, rtol=0, atol=0)
        assert not torch.equal(first.gradient(step, 1, 4), first.gradient(step, 2, 4))


def test_the_models_gradients_are_the_given_ones() -> None:
    model, drawn = Net(), Plan(1, 60).gradient(1, 0, 2)
    model(drawn).backward()
    grads = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    torch.testing.assert_close(grads, drawn, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--ranks", "1"], "--ranks 1 must be from 2 to 4: one of them leaves in mid-training"),
        (["--network", "mpi"], "invalid choice: 'mpi'"),
    ],
)
def test_wrong_options_get_a_sentence(given: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert main(["soak", *given]) == 2
    except SystemExit as ended:
        assert ended.code == 2
    assert message in capsys.readouterr().err
