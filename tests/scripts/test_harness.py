"""The harness: ranks and what they report, rounds and their summary, records, and two real ranks behind each door."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from clusters import need_cluster

from laboratory import ranks
from laboratory.harness import measured, rounds, ways
from laboratory.harness.measured import Lab, Rounds, Training
from laboratory.main import main
from laboratory.report import Progress
from laboratory.tasks.table import TASKS, files

EXACT, GTOPK, SKETCHED = "topk:ratio=1,wire=exact", "gtopk:ratio=0.01", "sketched_sgd:ratio=0.01"
BROKEN = [sys.executable, "-c", "print('something broke'); raise SystemExit(3)"]


def raw() -> dict[str, object]:
    """Make the figures that ranks report."""
    each = {
        "none": {"rounds": [[1.0, 1.0], [2.0, 2.0]], "bytes": 0, "loss": 2.3},
        "dense": {"rounds": [[3.0, 3.0], [6.0, 6.0]], "bytes": 400, "loss": 1.0},
        "topk:ratio=0.01": {"rounds": [[1.5, 1.5], [3.0, 3.0]], "bytes": 8, "loss": 1.1},
    }
    return {"ranks": 4, "batch": 64, "parameters": 100, "bytes_dense": 400, "ways": each}


def test_training_is_summed_up_against_none() -> None:
    run = rounds.summary(raw())
    lines = {line["way"]: line for line in run["lines"]}
    assert lines["dense"]["over"] == {"none": {"median": 3.0, "at_most": None}}
    assert lines["dense"]["ms"] == {"median": 4500.0, "low": 3000.0, "high": 6000.0}
    assert (lines["topk:ratio=0.01"]["compression"], lines["none"]["compression"]) == (50, None)
    table = rounds.table(run).splitlines()
    assert len(table) == 5
    assert table[-1].split()[-4:] == ["50", "x", "1.50,", "unresolved"]


def test_before_and_after_a_change_of_the_links_ways_are_compared_apart() -> None:
    """The round of the change counts in neither."""
    slow, fast = [8.0, 8.2, 7.9, 8.1], [2.0, 2.1, 1.9, 2.2, 2.0]
    stock = [*slow, 5.0, *fast]
    auto = [seconds / 2 for seconds in [*slow, 8.0]] + fast
    each = {"stock": stock, "auto": auto}
    found: Any = raw() | {
        "ways": {way: {"rounds": [[x] for x in rounds], "bytes": 4, "loss": 1.0} for way, rounds in each.items()}
    }
    line = rounds.summary(found, changes=True)["lines"][1]
    medians = {part: line[part]["stock"]["median"] for part in rounds.PARTS}
    assert medians == {"over": pytest.approx(0.9), "over_before": 0.5, "over_after": 1.0}
    assert "after it" in rounds.table(rounds.summary(found, changes=True))
    assert "over_after" not in rounds.summary(found)["lines"][1]


def test_a_result_is_told_from_other_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranks.tell("round 1", 0.5)
    ranks.report(raw())
    told = ["hello\n", *(f"[1,0]<stdout>:{line}\n" for line in capsys.readouterr().out.splitlines()), "bye\n"]
    with (tmp_path / "log").open("w") as log:
        result, tail = ranks.listen(told, Progress(every=0), "1gbit", log)
    assert (result, tail) == (raw(), ["hello\n", "bye\n"])
    assert "1gbit: round 1" in capsys.readouterr().err
    assert (tmp_path / "log").read_text() == "hello\nbye\n"


def test_ranks_that_fail_are_reported(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "command", lambda *given: BROKEN)
    assert main(["train", "--hosts", "2"]) == 1
    text = capsys.readouterr().err
    assert "something broke" in text
    assert "lab train: the ranks of 2 hosts, 1gbit, mlp by horovod failed with status 3; their last lines are above" in text


def test_a_launcher_that_is_missing_gets_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ranks.RanksFailed, match=r"could not be started: .*run scripts/setup"):
        ranks.run(["/no/such/launcher"], {}, "try")


def started_with(variable: bytes) -> dict[str, str]:
    """List the processes with this variable in their environment: number and command."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if variable in (process / "environ").read_bytes().split(b"\0"):
                found[process.name] = (process / "cmdline").read_bytes().decode().replace("\0", " ")
    return found


TRAIN = ["train", "--launcher", "local", "--hosts", "2", "--rounds", "1000000", "--set", "width=16", "--ways", "none,dense"]
STUDY = ["study", "--tasks", "conv", "--ranks", "2", "--specs", "topk", "--jobs", "2", "--set", "width=2,steps=1000000"]


@pytest.mark.parametrize(
    ("words", "child"),
    [(TRAIN, "-m laboratory.harness.rank"), pytest.param(STUDY, "multiprocessing.spawn", marks=pytest.mark.slow)],
)
def test_termination_leaves_no_process_behind(words: list[str], child: str, tmp_path: Path) -> None:
    if words is TRAIN:
        pytest.importorskip("horovod.torch", reason="the end of horovodrun was NOT tested: Horovod is not installed")
    mark = f"GRADCOMP_TEST_MARK={uuid.uuid4().hex}"
    name, _, value = mark.partition("=")
    places = ["--cache", str(tmp_path), "--out", str(tmp_path)]
    with (tmp_path / "said").open("w") as said:
        running = subprocess.Popen(
            [sys.executable, ranks.SCRIPTS / "lab", *words, *places], env=os.environ | {name: value}, stdout=said, stderr=said
        )

    def begun() -> bool:
        commands = list(started_with(mark.encode()).values())
        trains = words is STUDY or "by horovod: " in (tmp_path / "said").read_text()  # the ranks' progress
        return trains and sum(child in command for command in commands) >= 2

    try:
        wait_until(begun, 150)
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 130 and f"lab {words[0]}: interrupted" in (tmp_path / "said").read_text()
        wait_until(lambda: not started_with(mark.encode()), 20)
    finally:
        for process in started_with(mark.encode()):
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        running.wait()


def wait_until(true: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.1)


def launched(door: str, own: list[str]) -> dict[str, Any]:
    """Train the digits for some steps on two real ranks, in every one of these ways, and return the lines of the table."""
    small = TASKS["mlp"].defaults._replace(width=16, batch=8)
    made = Rounds(measured.LAUNCHERS[door], 2, "loopback", "mlp", small, own, 2, 3, 10.0, door)
    run = measured.perform(made, Lab("a test", Path()))
    assert (run["ranks"], run["batch"]) == (2, 8)
    assert all(len(line["ms_of_rounds"]) == 2 and line["over"] for line in run["lines"][1:])
    assert [line["way"] for line in run["lines"]] == own
    return {line["way"]: line for line in run["lines"]} | {"parameters": run["parameters"]}


@pytest.mark.slow
def test_two_real_ranks_train_through_horovod_in_every_way() -> None:
    """As `lab train` launches them, with the optimizer's own momentum. A turn has room for all steps on a slow machine too."""
    pytest.importorskip("horovod.torch", reason="harness/rank.py was NOT tested: Horovod is not installed")
    lines = launched(ways.HOROVOD, ["none", "stock", "fp16", EXACT, GTOPK, SKETCHED, "auto"])
    parameters = lines.pop("parameters")
    sent = {way: line["bytes_per_step"] for way, line in lines.items()}
    assert sent["none"] == 0
    assert sent["stock"] == 2 * sent["fp16"] == 4 * parameters
    assert sent[EXACT] >= 8 * parameters and sent[GTOPK] < sent[SKETCHED] < sent["stock"]
    assert abs(lines["stock"]["loss"] - lines[EXACT]["loss"]) < 1e-5  # the same training
    assert lines["auto"]["auto"]["seconds"] and set(lines["auto"]["over"]) == {"none", "stock"}  # it has chosen


@pytest.mark.slow
def test_two_real_ranks_train_through_ddp_in_every_way() -> None:
    own = ["none", "stock", "bf16", "bf16:steps=4", "fp16", "powersgd:rank=1", "dense", "auto", "local:2/1/0/dense"]
    lines = launched(ways.DDP, own)
    parameters = lines.pop("parameters")
    assert lines["stock"]["bytes_per_step"] == 2 * lines["bf16"]["bytes_per_step"] == 4 * parameters
    assert lines["bf16:steps=4"]["bytes_per_step"] == parameters // 2
    factors = (64 + 16) + 2 * (16 + 16) + (16 + 10)  # and biases, whole
    assert lines["powersgd:rank=1"]["bytes_per_step"] == 4 * (factors + 3 * 16 + 10)
    assert abs(lines["stock"]["loss"] - lines["dense"]["loss"]) < 1e-5
    assert set(lines["auto"]["over"]) == {"none", "stock", "bf16"}
    assert 0.3 < lines["local:2/1/0/dense"]["bytes_per_step"] / (4 * parameters) < 0.6


@pytest.mark.slow
@pytest.mark.parametrize("door, way, clip", [(ways.HOROVOD, "topk:ratio=0.1", 0.0), (ways.DDP, "powersgd:rank=1,start=4", 1.0)])
def test_real_ranks_lose_what_simulated_ones_do(door: str, way: str, clip: float, tmp_path: Path) -> None:
    """PowerSGD only before its start, up to which it is dense."""
    if door == ways.HOROVOD:
        pytest.importorskip("horovod.torch", reason="training over Horovod was NOT compared: Horovod is not installed")
    small = TASKS["shakespeare"].defaults._replace(steps=7, batch=2, width=32, depth=1, clip=clip)
    (tmp_path / "tinyshakespeare.txt").write_bytes(bytes(i * i % 251 for i in range(8000)))
    data = files(["shakespeare"], tmp_path, tmp_path)["shakespeare"]
    real = Training("shakespeare", way, 0, 2, small, door, data=data)
    simulated = real._replace(door=ways.SIMULATED, way="dense" if clip else way)
    measured.complete([real, simulated], tmp_path, Lab("a test", tmp_path))
    one, other = measured.load(real, tmp_path), measured.load(simulated, tmp_path)
    assert one and other and one["weights_are_equal"]
    if clip:
        assert one["losses"][:4] == pytest.approx(other["losses"][:4], abs=1e-5)
        dense = 4 * one["parameters"]
        assert one["sent"][:3] == [dense] * 3 and one["sent"][-3:] == [one["sent"][-1]] * 3 and one["sent"][-1] < dense / 3
    else:
        assert one["losses"] == other["losses"] and one["sent"] == other["sent"]


@pytest.mark.slow
def test_an_emulated_host_counts_what_its_interface_sends(tmp_path: Path) -> None:
    """A ring of two ranks sends a gradient once: half of it in either direction, twice."""
    need_cluster()
    small = TASKS["mlp"].defaults._replace(width=64, batch=8)
    made = Rounds("cluster", 2, "none", "mlp", small, ["none", "stock"], 1, 5, door=ways.DDP)
    run = measured.perform(made, Lab("a test", tmp_path))
    none, stock = (line["interface_bytes_per_step"] for line in run["lines"])
    assert none < 2000 and 1 < stock / (4 * run["parameters"]) < 1.2
    assert "on a host's interface" in rounds.table(run)


@pytest.mark.long
@pytest.mark.parametrize(("door", "hosts"), [("fsdp", 2), *((door, 4) for door in ways.SHARDS)])
def test_hosts_train_through_fsdp2_and_blocks_moves_18_hundredths_of_what_it_needs(
    door: str, hosts: int, tmp_path: Path
) -> None:
    """Subtract `none`, which gathers the parameters, too. Gloo's reduce-scatter moves as much as its all-reduce."""
    need_cluster()
    shards = ways.SHARDS[door] or hosts
    scattered, reduced = 1 - 1 / shards, 2 * (1 / shards - 1 / hosts)
    blocks = "blocks:route=alltoall"  # auto gathers tensors as small as these
    own = ["none", "stock", blocks, "alltoall" if door == "fsdp" else "bf16"]
    small = TASKS["mlp"].defaults._replace(width=512, batch=8)
    run = measured.perform(Rounds("cluster", hosts, "none", "mlp", small, own, 1, 2, door=door), Lab("a test", tmp_path))
    lines, whole = {line["way"]: line for line in run["lines"]}, 4 * run["parameters"]
    none = lines["none"]["interface_bytes_per_step"]
    share = {way: (line["interface_bytes_per_step"] - none) / whole for way, line in lines.items()}
    wanted = {"stock": 2 * scattered + reduced, "alltoall": scattered + reduced, "bf16": scattered + reduced / 2}
    assert all(way not in wanted or 1 < share[way] / wanted[way] < 1.05 for way in own)
    assert share[blocks] <= 0.18 * (scattered + reduced)
    assert all(abs(lines[way]["loss"] - lines["stock"]["loss"]) < (1e-5 if way == "alltoall" else 1e-3) for way in own[2:])


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("powersgd", "write for example powersgd:rank=4"),
        ("powersgd:rank=0", "write for example powersgd:rank=4"),
        ("powersgd:rank=4,start=1", "write for example powersgd:rank=4"),
        ("none:ratio=1", "write for example none"),
        ("tpk", "did you mean 'topk'.*beside gradcomp's specs: none, stock"),
        ("auto:loss=much", "loss"),
    ],
)
def test_a_wrong_way_is_refused_before_ranks_are_launched(way: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ways.check(way)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train --ways stock,bf16", "'bf16' is of the door ddp or fsdp or hsdp or replicate, not of horovod"),
        ("train --ways local:30/1/0/sign", "'local:30/1/0/sign' is of the door ddp and of simulated ranks, not of horovod"),
        ("train --ways stock,auto --door fsdp", "'auto' is not of the door fsdp"),
        ("train --ways bf16:steps=4 --door hsdp", "'bf16:steps=4' is not of the door hsdp"),
        ("train --ways stock --door hsdp --hosts 3", "shards a model on 2 hosts; let --hosts be a multiple, not 3"),
        ("train --ways alltoall --door hsdp", "'alltoall' is of the door fsdp, not of hsdp"),
        ("train --ways stock --launcher local --later 1gbit:5", "changes the links of --launcher cluster"),
        ("train --ways stock --later 1gbit:5", "--later needs at least 5 rounds"),
        ("train --ways stock --task cifar", "needs --data FOLDER"),
        ("train --ways stock --set depth=3", "mlp has no depth"),
        ("train --ways stock --set clip=1", "mlp clips gradients, which the ways would do differently"),
        ("study --specs none", "a study needs ways that exchange gradients and count their bytes"),
        ("study --specs bf16:steps=4 --set steps=3", "a step needs 4 batches, and conv has 3; give more steps"),
        ("study --specs topk --door ddp --set clip=1", "conv clips each rank's gradient, which dense cannot"),
        ("study --specs bf16 --door horovod", "'bf16' is of the door ddp or fsdp or hsdp or replicate, not of horovod"),
        ("study --specs topk --door ddp --ranks 1", "one real rank exchanges nothing"),
        ("study --specs topk --set mlp.lr=1", "--tasks does not contain 'mlp'"),
        ("study --specs topk --set batch=1000", "more than the 1437"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of_study = ["--tasks", "conv"] if words.startswith("study") else []
    assert main([*words.split(), *of_study, "--cache", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
