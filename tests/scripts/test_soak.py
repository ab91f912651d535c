"""`lab soak`: short soaks over real Horovod and DDP through the command line, and faults that its judge must find."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from laboratory.main import main
from laboratory.soak import judge
from laboratory.soak.plan import ENTRIES, SPIKED, Plan, split

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
STEPS, RANKS, SEED = 60, 2, 5


def soaked(network: str, folder: Path) -> tuple[int, dict[str, Any]]:
    """Run a short soak. Return its status and its record."""
    places = ["--cache", str(folder / "cache"), "--out", str(folder), "--name", "short"]
    settings = ["--steps", str(STEPS), "--ranks", str(RANKS), "--seed", str(SEED)]
    status = main(["soak", "--network", network, *settings, *places])
    return status, json.loads((folder / "soak-short.json").read_text())


def of_name(verdicts: list[judge.Verdict], name: str) -> judge.Verdict:
    return next(verdict for verdict in verdicts if verdict.name == name)


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any], Path]:
    """A short soak over DDP, with its logs and records."""
    folder = tmp_path_factory.mktemp("soak")
    return *soaked("ddp", folder), folder / "cache" / "short-ddp"


def check(status: int, record: dict[str, Any], network: str, kinds: set[str]) -> None:
    """Hold what each short soak shows."""
    found = record["networks"][network]
    verdicts = {verdict["name"]: verdict["holds"] for verdict in found["verdicts"]}
    assert status == 0, found["verdicts"]
    assert all(verdicts[name] for name in ("all ranks end", "replicas", "conservation"))
    assert kinds <= {trouble["kind"] for trouble in found["troubles"]}
    assert found["steps"] >= STEPS
    assert record["command"].startswith(f"scripts/lab soak --network {network} --steps {STEPS}")


def test_a_short_soak_over_ddp(ddp: tuple[int, dict[str, Any], Path]) -> None:
    status, record, folder = ddp
    check(status, record, "ddp", {"kill", "launch of 2 ranks", "launch of 1 ranks"})
    assert str(folder) not in json.dumps(record)


@pytest.mark.long  # Horovod takes half a minute to see that a rank has died
def test_a_short_soak_over_horovod(tmp_path: Path) -> None:
    pytest.importorskip("horovod.torch", reason="`lab soak --network horovod` was NOT tested: Horovod is not installed")
    check(*soaked("horovod", tmp_path), "horovod", {"kill", "join", "leave"})


def judged(folder: Path) -> list[judge.Verdict]:
    lines = [json.loads(line) for path in sorted(folder.glob("log-*.jsonl")) for line in path.read_text().splitlines()]
    return judge.judge(Plan(SEED, STEPS), RANKS, lines, [], folder)


def change(folder: Path, to: Path, change: Any) -> Path:
    """Copy a soak's folder, and change the record of rank 1's end."""
    shutil.copytree(folder, to)
    paths = {path: torch.load(path, weights_only=True) for path in to.glob("record-*.pt")}
    last = max(record["step"] for record in paths.values())
    path, record = next((path, own) for path, own in paths.items() if own["step"] == last and own["rank"] == 1)
    change(record)
    torch.save(record, path)
    return to


def test_a_lost_gradient_is_found(ddp: tuple[int, dict[str, Any], Path], tmp_path: Path) -> None:
    """Of one rank in one step, in one layer; at one entry; and in one message of entries beside the spikes."""
    plan, folder = Plan(SEED, STEPS), ddp[2]
    assert of_name(judged(folder), "conservation").holds
    lost = plan.gradient(STEPS // 2, 0, RANKS).nan_to_num(0, 0, 0)

    def of_layer(record: dict[str, Any]) -> None:
        for residual, gradient in list(zip(split(record["residual"]), split(lost), strict=True))[1:2]:
            residual -= gradient

    def of_entry(record: dict[str, Any]) -> None:
        record["residual"][ENTRIES - 100] -= 0.5

    def beside_spikes(record: dict[str, Any]) -> None:
        record["residual"][: SPIKED.stop : 50] = 0.0

    for name, fault in {"layer": of_layer, "entry": of_entry, "beside": beside_spikes}.items():
        verdict = of_name(judged(change(folder, tmp_path / name, fault)), "conservation")
        assert verdict.holds is False, name


def one_bit(record: dict[str, Any]) -> None:
    record["weights"][7] = torch.nextafter(record["weights"][7], torch.tensor(torch.inf))


def no_end(record: dict[str, Any]) -> None:
    record["final"] = False


@pytest.mark.parametrize(
    ("fault", "name", "said"),
    [
        (one_bit, "replicas", "ranks [1] differ"),
        (no_end, "all ranks end", "1 of 2 ranks"),
    ],
)
def test_a_fault_of_one_rank_is_found(
    fault: Any, name: str, said: str, ddp: tuple[int, dict[str, Any], Path], tmp_path: Path
) -> None:
    verdict = of_name(judged(change(ddp[2], tmp_path / "changed", fault)), name)
    assert verdict.holds is False and said in verdict.said


def test_an_interrupted_soak_leaves_no_process(tmp_path: Path) -> None:
    words = [sys.executable, str(ROOT / "scripts" / "lab"), "soak", "--network", "ddp", "--ranks", "2"]
    running = subprocess.Popen([*words, "--cache", str(tmp_path), "--out", str(tmp_path)], stderr=subprocess.PIPE, text=True)
    folder, until = tmp_path / "ddp", time.monotonic() + 100
    while not (logs := list(folder.glob("log-*.jsonl"))) and running.poll() is None and time.monotonic() < until:
        time.sleep(0.1)
    running.send_signal(signal.SIGTERM)  # as Ctrl-C, which a shell hides from what runs in the background
    _, said = running.communicate(timeout=60)
    assert running.returncode == 130 and "interrupted" in said
    pids = [int(path.stem.partition("-")[2]) for path in logs]
    assert pids and not any(_lives(pid) for pid in pids)


def _lives(pid: int) -> bool:
    """Is a process there, and more than an entry that its new parent has not taken off the list?"""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    except OSError:
        return False
