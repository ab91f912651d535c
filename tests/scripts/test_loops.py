"""`lab loops`: cells on real ranks through the command line, and the judgement of scores and warnings."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from laboratory.commands import loops
from laboratory.commands.loops import judge, table
from laboratory.loops.cell import FAILED, Key
from laboratory.main import main


def cell(spec: str, score: float | None, seed: int = 0, refused: str = "", warned: tuple[str, ...] = ()) -> Any:
    key = Key("base", "ddp", "sgd", spec, seed, 100)
    return key, {"key": list(key), "score": score, "refused": refused, "warned": list(warned)}


def test_a_cell_below_the_noise_of_plain_has_to_be_said() -> None:
    plains = [cell("", score, seed, warned=("of torch",)) for seed, score in enumerate((98.0, 97.0, 96.0))]
    cells = [
        cell("near", 95.0),
        cell("below", 94.0, warned=("of torch",)),
        cell("warned", 50.0, warned=("of gradcomp",)),
        cell("refused", None, refused="ValueError: no"),
        cell("broken", None, refused=f"{FAILED}KeyError: 'x'"),
        cell("lost", None),
        cell("again", 90.0),
        cell("again", 97.0, 1),
        cell("again", 98.0, 2),
        *(cell("broken once", 99.0 if seed else None, seed, "" if seed else f"{FAILED}KeyError: 'x'") for seed in range(3)),
        *(cell("lost once", None if seed == 2 else 99.0, seed) for seed in range(3)),
        *(cell("refused once", None if seed else 99.0, seed, "ValueError: no" if seed else "") for seed in range(2)),
        *(cell("warned once", 50.0, seed, warned=("of gradcomp",) * seed) for seed in range(2)),
    ]
    lines = judge(dict(plains + cells))
    found = {line["key"].spec: line["verdict"] for line in lines}
    wanted = {"near": "ok", "below": "worse", "warned": "warned", "refused": "refused", "broken": "failed"}
    once = {"broken once": "failed", "lost once": "worse", "refused once": "refused", "warned once": "warned"}
    assert found == wanted | once | {"lost": "worse", "again": "ok"}
    assert table(lines)[1][:5] == ["base, ddp, sgd", "97.0", "95.0", "94.0 WORSE", "50.0 warned"]


def test_a_cell_that_is_as_good_after_three_times_the_steps_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = judge(dict([cell("", 98.0), cell("late", 90.0), cell("worse", 90.0)]))
    ends = {"": 99.0, "late": 98.0, "worse": 91.0}
    monkeypatch.setattr(loops, "train", lambda keys: {key: cell(key.spec, ends[key.spec])[1] for key in keys})
    loops.train_longer(lines, argparse.Namespace(steps=100, seeds=1))
    assert [line["verdict"] for line in lines] == ["late", "worse"]
    assert lines[0]["longer"] == {"score": 98.0, "plain": 99.0, "noise": 0.0, "steps": 300}
    assert table(lines)[1][2:] == ["90.0 late", "90.0 WORSE"]


@pytest.mark.long
def test_a_case_on_real_ranks(tmp_path: Path) -> None:
    chosen = ["--cases", "AdamW(amsgrad)", "--doors", "ddp", "--specs", "topk", "--steps", "24", "--seeds", "1"]
    assert main(["loops", *chosen, "--out", str(tmp_path)]) in (0, 1)
    record = json.loads((tmp_path / "loops.json").read_text())
    (line,) = record["cells"]
    assert line["key"][0] == "AdamW(amsgrad)" and str(tmp_path) not in json.dumps(record)
    assert line["score"] > 10 and line["plain"] > 10 and not line["refused"], line
