"""What gradcomp says at the first step: one line, of rank 0, with what is exchanged and when."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from typing import Any

import doors
import pytest
import ranks
import torch
from doors import DDP, EVERY, OWN, Training
from small_net import net
from torch import nn, optim

import gradcomp

pytestmark = pytest.mark.filterwarnings("error")


class OwnStep(optim.AdamW):
    """An optimizer by AdamW that does something else."""


UPDATES = "exchanges updates after each step of "
HELD = ", whose momentum is in the residual"
# For each: the optimizer, the spec, and what is said of the exchange.
CASES: dict[str, tuple[Any, str, str]] = {
    "sgd": (lambda ps: optim.SGD(ps, 0.1, momentum=0.9), "topk", f"{UPDATES}SGD{HELD}"),
    "adamw": (lambda ps: optim.AdamW(ps), "topk", f"{UPDATES}AdamW{HELD}"),
    "coarse": (lambda ps: optim.NAdam(ps), "orq", f"{UPDATES}NAdam{HELD}"),
    "own momentum": (lambda ps: optim.AdamW(ps), "topk:momentum=0", f"{UPDATES}AdamW"),
    "unknown": (lambda ps: optim.Adagrad(ps), "topk", f"{UPDATES}Adagrad"),
    "subclass": (lambda ps: OwnStep(ps), "topk", f"{UPDATES}OwnStep"),
    "dense": (lambda ps: optim.RAdam(ps), "dense", "exchanges gradients"),
    "blocks": (lambda ps: optim.AdamW(ps), "blocks", "exchanges gradients"),
    "fine": (lambda ps: optim.AdamW(ps), "orq:levels=9", "exchanges gradients"),
    "no residual": (lambda ps: optim.AdamW(ps), "topk:feedback=false", "exchanges gradients"),
    "auto": (lambda ps: optim.AdamW(ps), "auto", "begins with dense, and chooses after some steps"),
}


@contextlib.contextmanager
def unconfigured() -> Any:
    """Be a program that has not configured logging. pytest has, for all loggers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.getLogger("gradcomp"), "hasHandlers", lambda: False)
        yield


def lines_of(door: str, case: str, *, steps: int = 3, then: str = "", **options: Any) -> tuple[list[str], str]:
    """Train some steps, and go on with another spec. Return the lines that are printed, and what stats() says then."""
    make, spec, _ = CASES[case]
    model, out = net(), io.StringIO()
    with contextlib.redirect_stderr(out), unconfigured():
        run = Training(door, model, spec, inner=make([*model.parameters()]), **options)
        run.train(steps)
        if then:
            run.handle.change(then)
            run.train(2)
    return out.getvalue().splitlines(), run.handle.stats()["exchanges"]


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("case", CASES)
def test_a_line_at_the_first_step(case: str) -> None:
    _, spec, exchanges = CASES[case]
    lines, now = lines_of(DDP, case)
    assert lines == [f"gradcomp: {spec} over DDP {exchanges}"]
    assert now.endswith("updates" if "updates" in exchanges else "gradients")


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("case, then", [("dense", "topk"), ("adamw", "blocks"), ("adamw", "sign")])
def test_another_spec_says_no_second_line(case: str, then: str) -> None:
    lines, now = lines_of(DDP, case, then=then)
    assert len(lines) == 1 and now == ("gradients" if then == "blocks" else "updates")


@pytest.mark.usefixtures("group_of_one")
def test_who_configures_logging_gets_a_record(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="gradcomp"):
        model = net()
        Training(DDP, model, "topk", inner=optim.SGD(model.parameters(), 0.1)).train(2)
    (record,) = [each for each in caplog.records if each.name == "gradcomp"]
    assert record.levelname == "INFO" and record.message.startswith("gradcomp: topk over DDP exchanges updates")


@pytest.mark.usefixtures("group_of_one")
def test_a_level_silences_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("gradcomp"), "level", logging.WARNING)
    assert lines_of(DDP, "sgd")[0] == []


def test_a_simulation_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with unconfigured():
        gradcomp.Simulation("topk", {"w": (40,)}, 2).step([{"w": torch.randn(40)}] * 2)
    assert capsys.readouterr() == ("", "")


# By every door.


def program(door: str) -> dict[str, Any]:
    doors.join(door)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = {case: lines_of(door, case) for case in ("adamw", "dense", "auto", "unknown")}
        if door != OWN:
            found["not given"] = lines_of(door, "sgd", given=False)
        if door == DDP:
            found["two"] = by_two()
    return found


def by_two() -> tuple[list[str], str]:
    """Step two optimizers of one model."""
    model, out = net(), io.StringIO()
    with contextlib.redirect_stderr(out), unconfigured():
        run = Training(DDP, model, "topk", given=False)
        first, *others = model.children()
        layers = nn.ModuleList(others)
        both = [optim.SGD(first.parameters(), 0.1, momentum=0.9), optim.AdamW(layers.parameters())]
        for _ in range(3):
            model.zero_grad()
            run.backward()
            for each in both:
                each.step()
    return out.getvalue().splitlines(), run.handle.stats()["exchanges"]


@ranks.once
def by_door(door: str) -> list[dict[str, Any]]:
    return ranks.launch(program, 2, door)


@pytest.mark.slow
@pytest.mark.parametrize("door", EVERY)
def test_rank_0_says_it_by_every_door(door: str) -> None:
    name = "DDP" if door == DDP else "Horovod"
    for rank, found in enumerate(by_door(door)):
        for case, (lines, _) in found.items():
            spec, exchanges = CASES.get(case, CASES["sgd"])[1:]
            assert lines == [f"gradcomp: {spec} over {name} {exchanges}"] * (rank == 0), case
