"""`lab soak`: short soaks over real Horovod and DDP through the command line, and faults that its judge must find."""

from __future__ import annotations

import itertools
import json
import os
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
from laboratory.soak.plan import ENTRIES, SPECS, SPIKED, Net, Plan, known_sum, ranks_of, split

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
    assert all(verdicts[name] for name in ("all ranks end", "replicas", "conservation", "processes left over"))
    assert kinds <= {trouble["kind"] for trouble in found["troubles"]}
    assert max(own["step"][-1] for own in found["processes"]) >= STEPS
    assert record["command"].startswith(f"scripts/lab soak --network {network} --steps {STEPS}")


def test_a_short_soak_over_ddp(ddp: tuple[int, dict[str, Any], Path]) -> None:
    status, record, folder = ddp
    check(status, record, "ddp", {"kill", "launch of 2 ranks", "launch of 1 ranks"})
    assert str(folder) not in json.dumps(record)
    assert (folder.parents[1] / "soak-short.png").stat().st_size > 10_000


def test_a_short_soak_over_horovod(tmp_path: Path) -> None:
    pytest.importorskip("horovod.torch", reason="`lab soak --network horovod` was NOT tested: Horovod is not installed")
    check(*soaked("horovod", tmp_path), "horovod", {"kill", "join", "leave"})


def judged(folder: Path) -> list[judge.Verdict]:
    lines = [json.loads(line) for path in sorted(folder.glob("log-*.jsonl")) for line in path.open()]
    return judge.judge(Plan(SEED, STEPS), RANKS, lines, [], folder, 0)


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


def test_replicas_that_differ_in_one_bit_are_found(ddp: tuple[int, dict[str, Any], Path], tmp_path: Path) -> None:
    def fault(record: dict[str, Any]) -> None:
        record["weights"][7] = torch.nextafter(record["weights"][7], torch.tensor(torch.inf))

    verdict = of_name(judged(change(ddp[2], tmp_path / "bit", fault)), "replicas")
    assert verdict.holds is False and "ranks [1] differ" in verdict.said


def test_a_rank_that_gives_something_else_is_found(ddp: tuple[int, dict[str, Any], Path], tmp_path: Path) -> None:
    def fault(record: dict[str, Any]) -> None:
        record["given"][-1] += 0.01

    verdict = of_name(judged(change(ddp[2], tmp_path / "given", fault)), "conservation")
    assert verdict.holds is False and "gave other gradients" in verdict.said


def test_a_rank_without_an_end_is_found(ddp: tuple[int, dict[str, Any], Path], tmp_path: Path) -> None:
    def fault(record: dict[str, Any]) -> None:
        record["final"] = False

    assert of_name(judged(change(ddp[2], tmp_path / "end", fault)), "all ranks end").holds is False


def logged(count: int = 1600, **changes: Any) -> list[dict[str, Any]]:
    """Make the log of one process. changes: functions of the line's number, by figure."""
    steady = {"rss_kb": 300_000, "fds": 20, "threads": 4, "cpu_ms": 10.0, "wall_ms": 12.0}
    lines: list[dict[str, Any]] = [{"pid": 1, "time": 0.0, "begins": 0, "ranks": 4}]
    for i in range(count):
        own = {key: changes[key](i) if key in changes else value for key, value in steady.items()}
        lines.append({"pid": 1, "time": 1.0 + i, "step": 50 * (i + 1), "ranks": 4, "spec": SPECS[i // 5 % len(SPECS)], **own})
    return lines


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("memory", {"rss_kb": lambda i: 300_000 + 40 * i}),
        ("open files", {"fds": lambda i: 20 + i // 500}),
        ("threads", {"threads": lambda i: 4 + i // 1200}),
        ("step time", {"cpu_ms": lambda i: 10 + i / 100}),
    ],
)
def test_what_grows_is_found(name: str, changes: Any) -> None:
    """40 kB of 50 steps, one file of 25,000 steps, a thread after 60,000, a step that takes twice as long after 50,000."""
    every = [*judge.flat(logged()), judge.step_time(logged(), [])]
    assert len(every) == 4 and all(verdict.holds for verdict in every)
    lines = logged(**changes)
    found = {verdict.name: verdict.holds for verdict in [*judge.flat(lines), judge.step_time(lines, [])]}
    assert found == {verdict.name: verdict.name != name for verdict in every}


def test_times_of_trouble_and_short_soaks_are_not_judged() -> None:
    lines = logged(cpu_ms=lambda i: 1000.0 if i >= 800 else 10.0)
    assert judge.step_time(lines, []).holds is False
    assert judge.step_time(lines, [{"time": 801.0, "seconds": 1e9}]).holds
    assert judge.step_time(lines, [{"time": 1.0, "seconds": 1e9}]).holds is None
    assert {verdict.holds for verdict in judge.flat(logged(judge.LEAST_LINES - 1))} == {None}


def test_a_process_that_outlives_its_launcher_is_found(tmp_path: Path) -> None:
    verdicts = judge.judge(Plan(0, 60), 2, logged(), [], tmp_path, 1)
    assert of_name(verdicts, "processes left over").holds is False and of_name(verdicts, "all ranks end").holds is False


def test_the_plan_is_the_same_for_whoever_asks() -> None:
    first, second = Plan(3, 20_000), Plan(3, 20_000)
    steps = range(3000)
    assert [first.spec(step) for step in steps] == [second.spec(step) for step in steps]
    assert {first.spec(step) for step in range(250 * len(SPECS))} == set(SPECS)
    assert sum(first.overflow(step) is not None for step in steps) == 10
    spikes = [sign for step in steps for _, sign in first.spikes(step)]
    assert abs(sum(spikes)) <= 1 and len(spikes) > 80
    for step in (0, 17, 251):
        torch.testing.assert_close(first.gradient(step, 1, 4), second.gradient(step, 1, 4), equal_nan=True, rtol=0, atol=0)
        assert not torch.equal(first.gradient(step, 1, 4), first.gradient(step, 2, 4))


def test_the_known_sum_is_that_of_the_ranks_of_each_step() -> None:
    plan, ranks = Plan(1, 60), ranks_of([[0, 2], [4, 1]], 6)
    assert ranks == [2, 2, 2, 2, 1, 1]
    wanted = torch.zeros(ENTRIES, dtype=torch.float64)
    for step, count in enumerate(ranks):
        of_ranks = [plan.gradient(step, rank, count).double() for rank in range(count)]
        wanted += sum(torch.where(own.isfinite(), own, 0.0) for own in of_ranks) / count
    torch.testing.assert_close(known_sum(plan, ranks), wanted)


def test_the_models_gradients_are_the_given_ones() -> None:
    model, drawn = Net(), Plan(1, 60).gradient(1, 0, 2)
    model(drawn).backward()
    grads = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    torch.testing.assert_close(grads, drawn, equal_nan=True, rtol=0, atol=0)


def test_an_interrupted_soak_leaves_no_process(tmp_path: Path) -> None:
    words = [sys.executable, str(ROOT / "scripts" / "lab"), "soak", "--network", "ddp", "--ranks", "2"]
    running = subprocess.Popen([*words, "--cache", str(tmp_path), "--out", str(tmp_path)], stderr=subprocess.PIPE, text=True)
    folder, until = tmp_path / "ddp", time.monotonic() + 100
    while not (logs := list(folder.glob("log-*.jsonl"))) and running.poll() is None and time.monotonic() < until:
        time.sleep(0.1)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 130 and "interrupted" in said
    pids = [int(path.stem.partition("-")[2]) for path in logs]
    assert pids and not any(_lives(pid) for pid in pids)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--duration", "5"], "'5' is not a duration; write for example 90s, 30m or 2h"),
        (["--duration", "0s"], "'0s' is not a duration"),
        (["--ranks", "1"], "--ranks 1 must be from 2 to 4: one of them leaves in mid-training"),
        (["--network", "mpi"], "invalid choice: 'mpi'"),
    ],
)
def test_wrong_options_get_a_sentence(given: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert main(["soak", *given]) == 2
    except SystemExit as ended:
        assert ended.code == 2
    assert message in capsys.readouterr().err


def test_stretches_end_where_ranks_change() -> None:
    lines = [
        {"pid": 1, "begins": 0},
        *({"pid": 1, "step": i} for i in range(3)),
        {"pid": 1, "begins": 3},
        {"pid": 1, "step": 4},
    ]
    assert [len(each) for each in judge.stretches_of(lines)] == [3, 1]
    assert list(itertools.chain(*judge.stretches_of(lines))) == [line for line in lines if "step" in line]
