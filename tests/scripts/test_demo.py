"""The demo: its data, table, plot and progress, and the training itself, really launched with horovodrun, small."""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import reference
import torch

pytest.importorskip("sklearn", reason="the demo was NOT tested: scikit-learn is not installed")
pytest.importorskip("matplotlib", reason="the demo was NOT tested: matplotlib is not installed")
pytest.importorskip("horovod.torch", reason="the demo was NOT tested: Horovod is not installed")

from laboratory import demo, machine, ranks
from laboratory.tasks import digits


def figures(way: str, sent: int) -> dict[str, Any]:
    return {
        "way": way,
        "parameters": 1000,
        "seconds": 0.06,
        "losses": [2.0, 1.0, 0.5],
        "sent": [sent] * 3,
        "scores": [[3, 0.06, 96.25]],
        "weights_are_equal": True,
    }


def test_held_out_pictures_are_never_trained_on() -> None:
    data = digits.load()
    assert (len(data["train_y"]), len(data["test_y"])) == (1437, 360)
    assert torch.equal(data["test_x"], digits.load()["test_x"])


def test_ranks_share_a_batch_and_never_a_picture() -> None:
    numbered = digits.load() | {"train_x": torch.arange(1437.0).unsqueeze(1)}
    parts = [digits.batches(numbered, rank, 3, 64) for rank in range(3)]
    seen = torch.cat([next(part)[0].flatten() for _ in range(7) for part in parts])
    assert len(seen.unique()) == 3 * 7 * 64


def test_a_batch_larger_than_the_data_is_refused() -> None:
    with pytest.raises(ValueError, match="more than the 1437"):
        next(digits.batches(digits.load(), 0, 30, 64))


def options(tmp_path: Path, *more: str) -> argparse.Namespace:
    return demo.parse(["--out", str(tmp_path), "--rate", "none", *more])


def test_the_table_is_aligned_and_has_the_figures(tmp_path: Path) -> None:
    trained = [figures("stock", 4000), figures("topk:ratio=0.01", 80) | {"seconds": 0.03}]
    lines = demo.table(trained, options(tmp_path), []).splitlines()
    assert len(lines) == 4
    assert len({len(line) for line in lines}) == 1
    assert lines[2].startswith("Horovod, dense ")
    assert lines[3].split() == ["topk:ratio=0.01", "10", "ms", "0.50", "80", "50", "x", "96.2", "%", "1.1667"]
    predicted = demo.table(trained, options(tmp_path, "--ddp", "--rate", "1gbit"), ["5 ms", "1 ms"]).splitlines()
    assert predicted[0].endswith("  at 1gbit, predicted") and predicted[2].startswith("DDP, dense ")
    assert predicted[3].endswith(" 1 ms")


def test_ranks_that_differ_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    differing = [figures("stock", 4000) | {"weights_are_equal": False}, figures("topk", 80)]
    monkeypatch.setattr(demo, "train", lambda way, rate, options: differing.pop(0))
    assert demo.main(["--out", str(tmp_path), "--specs", "topk", "--rate", "none"]) == 0
    said = capsys.readouterr().out
    assert "stock: the ranks' weights DIFFER" in said and "topk: the ranks' weights" not in said


def test_where_links_cannot_be_emulated_their_times_are_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "train", lambda way, rate, options: figures(way, 80) | {"rate": rate})
    monkeypatch.setattr(
        ranks,
        "on_cluster",
        lambda *given: ["sh", "-c", "echo 'cluster: it needs root; run it as: sudo cluster ...' >&2; exit 1"],
    )
    threads, seen, predict = torch.get_num_threads(), [], demo.predict
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # which every rank has
    monkeypatch.setattr(demo, "predict", lambda *own, **more: seen.append(torch.get_num_threads()) or predict(*own, **more))
    assert demo.main(["--out", str(tmp_path), "--specs", "blocks", "--rate", "10mbit", "--width", "256"]) == 0
    assert seen == [3] and torch.get_num_threads() == threads
    said = capsys.readouterr().out
    assert "The ranks are processes of this machine.\nLinks of 10mbit are not emulated: it needs root." in said
    dense, blocks = (float(line.split()[-2]) for line in said.splitlines() if " x " in line and line.endswith(" ms"))
    # 0.6 MB by 10 Mbit/s: half of it from each rank to the other, twice. Blocks send five bits of 32.
    assert 470 < dense < 700 and blocks < dense / 4


def test_a_failing_training_shows_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ranks, "command", lambda *given: ["sh", "-c", "echo the network broke; exit 3"])
    assert demo.main(["--out", str(tmp_path), "--rate", "none"]) == 1
    said = capsys.readouterr().err
    assert "the network broke\n" in said
    assert f"demo: the ranks of stock failed with status 3; all output is in {tmp_path / 'stock.log'}" in said
    assert (tmp_path / "stock.log").read_text() == "the network broke\n"


@pytest.mark.parametrize("python", [sys.executable, "/nowhere/python"])
def test_help_sets_nothing_up(python: str) -> None:
    """The options come from the program, or the head of the script where that does not load."""
    asked = subprocess.run(
        [str(Path(__file__).parents[2] / "scripts" / "demo"), "--help"],
        env={"PATH": os.environ["PATH"], "GRADCOMP_PYTHON": python},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert asked.returncode == 0 and "--ddp" in asked.stdout and not asked.stderr


def test_a_wrong_spec_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        demo.main(["--specs", "tpk"])
    assert ended.value.code == 2 and "did you mean 'topk'" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="a strange host name was NOT tried: needs root")
def test_a_host_name_that_does_not_resolve_ends_the_demo_before_the_training(tmp_path: Path) -> None:
    command = f"hostname nowhere-{os.getpid()} && exec {sys.executable} -m laboratory.demo --out {tmp_path}"
    environment = {**os.environ, "PYTHONPATH": str(machine.ROOT / "scripts")}
    done = subprocess.run(["unshare", "--uts", "sh", "-c", command], capture_output=True, text=True, env=environment)
    assert done.returncode == 1 and "Handwritten" not in done.stdout
    assert f"demo: host name nowhere-{os.getpid()}, which does not resolve" in done.stderr and "/etc/hosts" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("door, spec", [("horovod", "topk:ratio=0.1"), ("ddp", "bf16")])
def test_the_demo_trains_on_two_ranks(door: str, spec: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--steps", "100", "--width", "64", "--specs", spec, "--out", str(tmp_path)]
    assert demo.main([*(["--ddp"] if door == "ddp" else []), *small]) == 0
    said = capsys.readouterr().out
    parameters = 64 * 64 + 2 * 64 * 64 + 3 * 64 + 64 * 10 + 10
    sent = 2 * parameters if door == "ddp" else reference.compact_bytes(parameters, -(-parameters // 10))
    dense, compressed = (line for line in said.splitlines() if " ms " in line and " % " in line)
    assert f"{4 * parameters:,}" in dense and f"{sent:,}" in compressed
    for line in (dense, compressed):
        accuracy = float(line.split(" %")[0].split()[-1])
        assert accuracy > 50
    assert "DIFFER" not in said
    assert ("two emulated hosts with links of 200mbit" in said) == (demo.why_unshaped("200mbit") is None)
    plot, log = tmp_path / "loss.png", tmp_path / "topk-ratio-0-1.log"
    assert str(plot) in said and plot.read_bytes().startswith(b"\x89PNG")
    assert door == "ddp" or "exchanges updates after each step of SGD" in log.read_text()
