"""`lab trainers`: a plain loop on real ranks by the command line, losses judged by the same seeds, the table of the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from laboratory.commands.loops import judge
from laboratory.commands.trainers import is_far, table
from laboratory.loops.cell import Key
from laboratory.main import main

# The losses of three seeds, 3 and 3.5 % above those of the trainer alone.
NEAR_AND_FAR = {"near": (1.18, 2.0, 3.0), "far": (1.0, 2.0, 3.21)}


def cell(spec: str, score: float | None, seed: int = 0, refused: str = "") -> Any:
    key = Key("Fabric", "ddp", "sgd", spec, seed, 100)
    return key, {"key": list(key), "score": score, "refused": refused, "warned": []}


def test_a_mean_loss_is_compared_with_that_of_the_trainer_alone() -> None:
    alone = [cell("", loss, seed) for seed, loss in enumerate((1.0, 2.0, 3.0))]
    near, far = ([cell(spec, loss, seed) for seed, loss in enumerate(losses)] for spec, losses in NEAR_AND_FAR.items())
    lines = judge(dict([*alone, *near, *far, cell("refused", None, refused="ValueError: no")]), is_far)
    found = {line["key"].spec: line["verdict"] for line in lines}
    assert found == {"near": "ok", "far": "worse", "refused": "refused"}
    cells = [{**line, "key": list(line["key"][:4])} for line in lines]
    assert table(cells)[1] == ["Fabric, SGD", "2.000", "+3.0 %", "+3.5 % WORSE", "refused"]


def test_a_plain_loop_on_real_ranks(tmp_path: Path) -> None:
    (tmp_path / "tinyshakespeare.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    places = ["--data", str(tmp_path), "--cache", str(tmp_path), "--out", str(tmp_path)]
    chosen = ["--trainers", "plain, step(closure)", "--specs", "topk:ratio=1,wire=exact", "--steps", "60", "--seeds", "1"]
    assert main(["trainers", *places, *chosen]) == 0
    record = json.loads((tmp_path / "trainers-gpt.json").read_text())
    assert len(record["cells"]) == 2 and str(tmp_path) not in json.dumps(record)
    for line in record["cells"]:
        assert line["verdict"] == "ok" and 0.5 < line["score"] < 5.2, line
