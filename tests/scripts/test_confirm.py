"""`lab confirm`: real Horovod processes against the simulated ranks of a study, tiny, through the command line."""

import json
import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("horovod.torch", reason="`lab confirm` was NOT tested: Horovod is not installed")

import gradcomp
from laboratory.commands import confirm
from laboratory.main import main
from laboratory.study import job
from laboratory.study.runs import Run

SMALL = "steps=5,batch=2,width=32,depth=1,clip=0"
SPECS = "topk:ratio=0.1"


def test_real_ranks_lose_what_simulated_ones_do(tmp_path: Path) -> None:
    places = ["--cache", str(tmp_path / "cache"), "--out", str(tmp_path)]
    assert main(["confirm", "--tasks", "library", "--specs", SPECS, "--ranks", "2", "--set", SMALL, *places]) == 0
    result = json.loads((tmp_path / "confirm.json").read_text())
    assert str(tmp_path) not in json.dumps(result)
    assert [line["spec"] for line in result["lines"]] == SPECS.split(";")
    for line in result["lines"]:
        assert line["weights_are_equal"] and line["first_other_loss"] is None
        assert line["score"] == line["simulated_score"]


def test_a_loss_that_differs_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    simulated = {"losses": [2.0, 1.5, 1.0], "score": 50.0, "commit": "0123456789ab"}
    real = {"losses": [2.0, 1.25, 1.0], "score": 49.0, "weights_are_equal": False, "spec": "topk", "seconds": 1.0}
    monkeypatch.setattr(Run, "load", lambda run, folder: simulated)
    monkeypatch.setattr(confirm.ranks, "run", lambda *given: real)
    task = confirm.TASKS["library"]
    line = confirm.compared(Run("library", "topk", 0, 2, task.defaults), tmp_path)
    assert line["first_other_loss"] == 2
    assert "the simulated run of topk is of 0123456789ab" in capsys.readouterr().err
    assert confirm.rows([line])[1][1:] == ["49.00", "50.00", "to step 1", "DIFFERENT"]


@pytest.mark.parametrize("spec", ["topk", "topk:ratio=0.01", "orq:levels=9"])
def test_the_knob_clips_each_rank_as_the_study_does(spec: str) -> None:
    assert job.bounded(spec, 0, 4) == spec
    shapes = {"a": (3, 4), "b": (5,)}
    generator = torch.Generator().manual_seed(1)
    grads = [{name: torch.randn(shape, generator=generator) for name, shape in shapes.items()} for _ in range(4)]
    everything = gradcomp.Simulation(job.bounded("topk:ratio=1,wire=exact", 1.0, 4), shapes, 4)
    lengths = [math.sqrt(sum(float(grad.square().sum()) for grad in own.values())) for own in grads]
    assert min(lengths) > 1
    expected = {name: sum(own[name] / length for own, length in zip(grads, lengths, strict=True)) / 4 for name in shapes}
    for name, update in everything.step(grads).items():
        torch.testing.assert_close(update, expected[name])
    gradcomp.make(job.bounded(spec, 1.0, 4))


def test_dense_cannot_clip_over_horovod(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["confirm", "--tasks", "library", "--specs", "dense", "--cache", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert "leave it out, or --set clip=0" in capsys.readouterr().err
    assert main(["confirm", "--tasks", "text", "--specs", "topk", "--cache", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert "hides its optimizer" in capsys.readouterr().err
    for words, said in ((["topk:clip=1"], "clips each rank's gradient already"), (["topk", "--ranks", "1"], "at least two")):
        assert main(["confirm", "--tasks", "library", "--cache", str(tmp_path), "--out", str(tmp_path), "--specs", *words]) == 2
        assert said in capsys.readouterr().err
