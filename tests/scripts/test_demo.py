"""The demo: its data, table, plot and progress, and the training itself, really launched with horovodrun, small."""

import argparse
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sklearn", reason="the demo was NOT tested: scikit-learn is not installed")
pytest.importorskip("matplotlib", reason="the demo was NOT tested: matplotlib is not installed")
pytest.importorskip("horovod.torch", reason="the demo was NOT tested: Horovod is not installed")

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import demo_report  # noqa: E402
import demo_run  # noqa: E402
import digits  # noqa: E402


def figures(spec: str, sent: int) -> dict[str, Any]:
    return {
        "spec": spec,
        "ranks": 2,
        "parameters": 1000,
        "seconds": [0.01, 0.02, 0.5],
        "losses": [2.0, 1.0, 0.5],
        "bytes_per_step": sent,
        "accuracy": 0.9625,
        "ranks_equal": True,
    }


def test_the_reference_model_has_the_size_it_is_known_by() -> None:
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in digits.model().parameters()) == 8_546_314


def test_what_is_held_out_is_never_trained_on() -> None:
    data = digits.load()
    assert (len(data.train_y), len(data.test_y)) == (1437, 360)
    again = digits.load()
    assert torch.equal(data.test_x, again.test_x)


def test_ranks_share_a_batch_and_never_a_picture() -> None:
    data = digits.load()
    numbered = data._replace(train_x=torch.arange(1437.0).unsqueeze(1))
    parts = [digits.batches(numbered, rank, 3, 64) for rank in range(3)]
    seen = torch.cat([next(part)[0].flatten() for _ in range(7) for part in parts])
    assert len(seen.unique()) == 3 * 7 * 64


def test_a_batch_larger_than_the_data_is_refused() -> None:
    with pytest.raises(ValueError, match="more than the 1437"):
        next(digits.batches(digits.load(), 0, 30, 64))


def test_the_table_is_aligned_and_has_the_figures() -> None:
    lines = demo_report.table([figures("dense", 4000), figures("topk:ratio=0.01", 80)]).splitlines()
    assert len(lines) == 4
    assert len({len(line) for line in lines}) == 1
    assert lines[3].split() == ["topk:ratio=0.01", "20", "ms", "80", "50", "x", "96.2", "%", "1.1667"]


def test_ranks_that_differ_are_not_passed_over() -> None:
    assert "DIFFER" in demo_report.table([figures("dense", 4000) | {"ranks_equal": False}])


def test_progress_comes_in_lines_where_there_is_no_terminal() -> None:
    out, log = io.StringIO(), io.StringIO()
    said = [f"[1,0]<stdout>:{demo_run.MARK}{step} 4 0.5000\n" for step in range(1, 5)]
    demo_run.follow([*said, "a warning\n"], log, demo_run.Bar("dense", out))
    assert log.getvalue() == "a warning\n"
    assert [line.split()[:3] for line in out.getvalue().splitlines()] == [["dense", "step", "4/4"]]


def test_progress_is_a_bar_on_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    bar = demo_run.Bar("dense", out)
    bar.show(2, 4, "0.5")
    bar.end()
    assert f"[{'#' * 15}{'.' * 15}] dense  step 2/4  loss 0.5" in out.getvalue()
    assert out.getvalue().endswith("\n")


def test_a_failing_training_shows_the_end_of_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "horovodrun"
    fake.write_text("#!/bin/sh\necho the network broke\nexit 3\n")
    fake.chmod(0o755)
    monkeypatch.setattr(demo_run, "horovodrun", lambda: str(fake))
    options = argparse.Namespace(out=tmp_path, steps=1, lr=0.1, seed=0, width=8)
    with pytest.raises(SystemExit, match=r"the network broke\n.*dense training failed \(horovodrun ended with 3\).*dense\.log"):
        demo_run.run("dense", "dense", options)


def test_a_bad_spec_is_refused_before_anything_starts() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/demo_run.py", "--spec", "tpk"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "did you mean 'topk'" in done.stderr


@pytest.mark.slow
def test_the_demo_trains_on_two_ranks(tmp_path: Path) -> None:
    small = ["--steps", "150", "--width", "64", "--spec", "topk:ratio=0.1", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "scripts/demo_run.py", *small], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    parameters = 64 * 64 + 2 * 64 * 64 + 3 * 64 + 64 * 10 + 10
    padded = -(-4 * -(-parameters // 10) // 8) * 8  # a tenth of the entries in 32 bits each, up to a multiple of 8 bytes
    dense, compressed = (line for line in done.stdout.splitlines() if " ms " in line and " % " in line)
    assert f"{4 * parameters:,}" in dense
    assert f"{8 + 8 + padded:,}" in compressed  # a header, one block's count, entries
    for line in (dense, compressed):
        accuracy = float(line.split(" %")[0].split()[-1])
        assert accuracy > 50
    assert "DIFFER" not in done.stdout
    plot = tmp_path / "loss-against-bytes.png"
    assert str(plot) in done.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")
