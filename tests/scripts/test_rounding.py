"""lab rounding: the Microscaling formats by their definition, and a small real run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from laboratory.commands import rounding
from laboratory.commands.rounding import FORMATS, microscaling
from laboratory.main import main


def test_the_formats_are_those_of_the_specification() -> None:
    assert FORMATS["MXFP4"].numbers().tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert FORMATS["MXFP6"].numbers().max() == 7.5 and len(FORMATS["MXFP6"].numbers()) == 32
    ours = FORMATS["MXFP8"].numbers()
    every = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()  # 127 is no number
    assert torch.equal(ours, every)


def test_a_group_has_a_power_of_two_and_large_entries_are_cut() -> None:
    x = torch.zeros(40)
    x[:5] = torch.tensor([7.9, -3.4, 0.2, 0.3, -1.2])
    x[32] = 0.011
    said = microscaling(FORMATS["MXFP4"], x)
    assert said[:5].tolist() == [6, -3, 0, 0.5, -1] and said[5:32].count_nonzero() == 0
    assert float(said[32]) == 6 * 2.0**-9  # its group's own: 0.011 = 5.6 x 2^-9


def test_the_table_and_the_record(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tinyshakespeare.txt").write_bytes(bytes(range(32, 127)) * 40)
    monkeypatch.setattr(rounding, "STEPS", (1, 2))
    folders = ["--data", str(tmp_path), "--cache", str(tmp_path / "cache"), "--out", str(tmp_path)]
    small = ["--set", "width=32,depth=1,batch=2", "--ranks", "2", "--name", "try"]
    assert main(["rounding", *folders, *small, "--specs", "half;blocks;blocks:bits=3"]) == 0
    lines = {line["way"]: line for line in json.loads((tmp_path / "rounding-try.json").read_text())["lines"]}
    assert list(lines)[:3] == ["MXFP8", "MXFP6", "MXFP4"] and len(lines["blocks"]["errors"]) == 2
    assert all(0 < lines["half"]["errors"][i] < lines["blocks"]["errors"][i] < lines["MXFP4"]["errors"][i] for i in (0, 1))
    assert main(["rounding", *folders, *small, "--specs", "topk"]) == 2
    assert "topk does not round every entry" in capsys.readouterr().err
