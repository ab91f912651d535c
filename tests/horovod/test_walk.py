"""What a step costs the host: Python calls inside gradcomp in backward() and step(), and the files that they enter."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import ranks
import torch
from doors import DDP, EVERY, Training, join
from torch import nn

import gradcomp

pytestmark = pytest.mark.slow

PACKAGE = f"{Path(gradcomp.__file__).parent}/"


class Budget(NamedTuple):
    """The most calls and files of a step of two layers, in one bucket."""

    calls: int
    files: int


BUDGETS = {"blocks": Budget(62, 13), "topk": Budget(150, 20)}
# Under Horovod, a single rank trains without an exchange.
CASES = [(DDP, 1), *((door, 2) for door in EVERY)]
# Steps before the measurement, in which things are made that later steps keep; the least of some more is measured.
BEFORE, MEASURED = 60, 9


def program(door: str, spec: str) -> list[tuple[int, list[str]]]:
    """Train, and return each measured step's calls and files."""
    join(door)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 4))
    run = Training(door, model, spec, inner=torch.optim.AdamW(model.parameters(), 1e-3))
    calls: list[str] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls.append(frame.f_code.co_filename.removeprefix(PACKAGE))

    found = []
    for step in range(BEFORE + MEASURED):
        run.optimizer.zero_grad()
        loss = run.whole(torch.randn(8, 32)).square().mean()
        calls.clear()
        if step >= BEFORE:
            threading.setprofile(note)  # of torch's threads
            sys.setprofile(note)
        loss.backward()
        run.optimizer.step()
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        found.append((len(calls), sorted({*calls})))
    return found[BEFORE:]


@pytest.mark.parametrize("door, count", CASES)
@pytest.mark.parametrize("spec", BUDGETS)
def test_a_step_keeps_to_its_budget_of_calls_and_files(spec: str, door: str, count: int) -> None:
    for steps in ranks.launch(program, count, door, spec):
        # Each by itself: a step that measures Adam's noise may have no more calls than another, and enters one more file.
        calls, files = min(calls for calls, _ in steps), min((files for _, files in steps), key=len)
        assert calls <= BUDGETS[spec].calls, f"{calls} calls, of {files}"
        assert len(files) <= BUDGETS[spec].files, " ".join(files)
