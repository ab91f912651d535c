"""The examples, each run on real ranks: the loss falls, ranks stay equal, and what each promises holds to the bit."""

from __future__ import annotations

import contextlib
import os
import random
import re
import runpy
import shutil
import signal
import socket
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy
import pytest
import ranks
import torch
import torch.distributed as dist
from clusters import cluster, need_cluster
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
# What an example made, until its process ends. torch 2.13's DDP model can hang as it goes: it waits for a thread of gloo, and
# that one for Python.
KEPT: list[dict[str, Any]] = []
needs_digits = pytest.mark.skipif(
    find_spec("sklearn") is None, reason="this example was NOT run: scikit-learn is not installed"
)


def example(name: str, port: int, killed_at: list[int], *arguments: str) -> dict[str, Any]:
    """Run an example as a rank of either launcher. killed_at: the save, by rank, in which this rank is killed; 0 for none."""
    rank, size = os.environ["HOROVOD_RANK"], os.environ["HOROVOD_SIZE"]
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    saves, save = [0], torch.save

    def save_or_die(*given: Any, **options: Any) -> None:
        saves[0] += 1
        if saves[0] == killed_at[int(rank)]:
            os.kill(os.getpid(), signal.SIGKILL)
        save(*given, **options)

    torch.save = save_or_die
    end, dist.destroy_process_group = dist.destroy_process_group, lambda: None  # weights are read after the example
    warnings.filterwarnings("ignore", message="the states of 1 of 2 ranks are missing")  # as local_steps.py wants it
    sys.argv = [name, *arguments]
    sys.path.insert(0, str(EXAMPLES))  # as Python does for a script
    found = runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    KEPT.append(found)
    weights = torch.cat([entire(parameter.detach()).flatten() for parameter in found["model"].parameters()])
    if dist.is_initialized():
        end()
    own = {name: found.get(name) for name in ("losses", "skipped", "gap")}
    return {"weights": weights, "model": type(found["model"]).__name__, **own}


def entire(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def is_free(port: int) -> bool:
    """Say whether nobody listens on a port. It is none that a connection of some program takes by itself."""
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
        return True
    return False


def run(name: str, *arguments: str, killed_at: tuple[int, ...] = (0, 0)) -> list[dict[str, Any]]:
    """Run an example on a rank for each entry of killed_at. Hold the survivors to equal weights."""
    port = next(filter(is_free, random.sample(range(20_000, 30_000), 100)))
    dies = {rank: -signal.SIGKILL for rank, at in enumerate(killed_at) if at}
    found = ranks.launch(example, len(killed_at), name, port, list(killed_at), *arguments, seconds=60, dies=dies)
    for own in found:
        assert torch.equal(own["weights"], found[0]["weights"]), "the ranks' weights differ"
    return found


def falls(found: list[dict[str, Any]], share: float) -> None:
    """Hold each rank's loss to this share of what it was at first."""
    for own in found:
        first, last = (sum(part) / len(part) for part in (own["losses"][:5], own["losses"][-5:]))
        assert last < share * first, f"the loss went from {first:.3f} to {last:.3f}"


@needs_digits
def test_both_doors_learn_the_digits_alike_to_the_bit() -> None:
    horovod, ddp = (run(name, "--steps", "50") for name in ("stock_horovod.py", "ddp.py"))
    falls(horovod, 0.5)
    for own, other in zip(horovod, ddp, strict=True):
        assert own["losses"] == other["losses"] and torch.equal(own["weights"], other["weights"])


@needs_digits
def test_the_residual_net_learns_digits() -> None:
    falls(run("cifar.py", "--steps", "30"), 0.7)


def test_the_residual_net_reads_the_pictures_of_cifar(tmp_path: Path) -> None:
    """In their binary form: a class, then red, green and blue planes. Here the class is the colour that is bright."""
    rows = numpy.zeros((60, 3073), numpy.uint8)
    rows[:, 0] = numpy.arange(60) % 3
    for i, row in enumerate(rows):
        row[1 + 1024 * (i % 3) :][:1024] = 255
    rows[:40].tofile(tmp_path / "data_batch_1.bin")
    rows[40:].tofile(tmp_path / "data_batch_2.bin")
    falls(run("cifar.py", "--data", str(tmp_path), "--steps", "12"), 0.5)


def test_the_transformer_learns_text(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    falls(run("transformer.py", "--text", str(text), "--steps", "30"), 0.6)


def test_accumulated_batches_train_as_one_large_batch() -> None:
    """A rank draws the same examples. Sums of float32 gradients in another order, over few steps, differ by rounding alone."""
    parts, whole = (
        run("accumulation.py", "--steps", "5", "--accumulate", n, "--batch", b) for n, b in (("4", "8"), ("1", "32"))
    )
    torch.testing.assert_close(parts[0]["weights"], whole[0]["weights"], rtol=1e-4, atol=1e-5)


def test_the_clip_bounds_every_step() -> None:
    """Weights move by at most the rate times the clip, times the sum of the momentum's powers, in each step."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))  # as the example makes it
    start = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
    moved = [
        (run("accumulation.py", "--steps", "4", "--clip", clip)[0]["weights"] - start).norm() for clip in ("0.001", "1000")
    ]
    assert 0 < moved[0] <= 4 * 0.1 * 0.001 / (1 - 0.9) < moved[1]


@needs_digits
def test_local_steps_go_on_to_the_bit_and_without_a_rank(tmp_path: Path) -> None:
    once, again = tmp_path / "once", tmp_path / "again"
    whole = run("local_steps.py", str(once), "--steps", "80")
    falls(whole, 0.7)
    for steps in ("40", "80"):
        parts = run("local_steps.py", str(again), "--steps", steps)
    assert all(torch.equal(own["weights"], other["weights"]) for own, other in zip(whole, parts, strict=True))
    shutil.rmtree(once / "rank-0")
    run("local_steps.py", str(once), "--steps", "100")


@needs_digits
def test_two_sites_learn_the_digits() -> None:
    for spec in ("blocks", "topk"):
        falls(run("two_sites.py", "--spec", spec, "--steps", "90", killed_at=(0,) * 4), 0.5)


@needs_digits
def test_two_sites_that_are_hosts_with_a_slow_link() -> None:
    """As the page on local steps runs it; rank 0 sees the loss of its own site fall."""
    need_cluster()
    options = "--hosts 2 --ranks-per-host 2 --rate 10mbit --launcher torch --output 0"
    done = cluster(options, [sys.executable, str(EXAMPLES / "two_sites.py"), "--steps", "100"])
    assert done.returncode == 0, done.stderr
    losses = [float(each) for each in re.findall(r"loss (\S+) on rank 0", done.stdout)]
    assert len(losses) == 2 and losses[1] < losses[0] / 2
    assert "between the sites, each rank sends 1239 times fewer bytes" in done.stdout


def test_fsdp_goes_on_to_the_bit_and_on_another_mesh(tmp_path: Path) -> None:
    once, again = tmp_path / "once", tmp_path / "again"
    whole = run("fsdp.py", str(once), "--steps", "16")
    for steps in ("8", "16"):
        resumed = run("fsdp.py", str(again), "--steps", steps)
    assert len(resumed[0]["losses"]) == 8 and resumed[0]["losses"] == whole[0]["losses"][8:]
    assert torch.equal(resumed[0]["weights"], whole[0]["weights"])
    other = run("fsdp.py", str(once), "--mesh", "replicate", "--steps", "24")
    falls([{"losses": own["losses"] + more["losses"]} for own, more in zip(whole, other, strict=True)], 0.8)


@needs_digits
def test_a_scale_that_overflows_skips_steps_by_both_doors_and_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    horovod = run("gradscaler.py", "--steps", "60")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "as torchrun sets it")
    ddp = run("gradscaler.py", "--steps", "60")
    assert ddp[0]["skipped"] == ddp[1]["skipped"] > 0
    falls(ddp, 0.5)
    assert ddp[0]["losses"] == horovod[0]["losses"] and torch.equal(ddp[0]["weights"], horovod[0]["weights"])
    assert [(own["model"], own["skipped"]) for own in horovod] == [("Sequential", ddp[0]["skipped"])] * 2
    assert ddp[0]["model"] == "DistributedDataParallel"


@needs_digits
def test_a_gan_ends_as_by_ddp_alone() -> None:
    """Gradients that come late, as by topk before it exchanged updates, made the gap three times as large."""
    gaps = {spec: run("gan.py", "--spec", spec)[0]["gap"] for spec in ("none", "blocks", "auto")}
    assert gaps["none"] < 1.2 and all(gap < 1.3 * gaps["none"] for gap in gaps.values()), gaps


def test_a_killed_training_ends_as_one_that_was_not(tmp_path: Path) -> None:
    """Both ranks are killed in their second save. Then one of the two has finished it: that checkpoint is not whole.

    The next one has a third rank's file, which would make it one of three ranks.
    """
    options = ("--steps", "60", "--every", "20")
    whole = run("resume.py", str(tmp_path / "whole"), *options)
    falls(whole, 0.6)
    broken = tmp_path / "broken"
    run("resume.py", str(broken), *options, killed_at=(2, 2))
    assert [str(path.relative_to(broken)) for path in sorted(broken.rglob("*.pt"))] == [f"step-00000020/{i}.pt" for i in "01"]
    shutil.copy(tmp_path / "whole" / "step-00000040" / "0.pt", broken / "step-00000040")
    (broken / "step-00000060").mkdir()
    shutil.copy(tmp_path / "whole" / "step-00000040" / "1.pt", broken / "step-00000060" / "2.pt")
    resumed = run("resume.py", str(broken), *options)
    assert sorted(path.name for path in (broken / "step-00000060").iterdir()) == ["0.pt", "1.pt"]
    assert len(resumed[0]["losses"]) == 40 and resumed[0]["losses"] == whole[0]["losses"][20:]
    assert torch.equal(resumed[0]["weights"], whole[0]["weights"])


def test_elastic_training_learns() -> None:
    """Here nobody leaves or joins."""
    falls(run("elastic.py", "--steps", "60"), 0.8)
