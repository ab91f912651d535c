"""A rank that waits long logs its exchange, and under DDP the missing ranks; and the pauses between looks at Horovod's."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import doors
import horovod.torch as hvd
import pytest
import rank_server
import ranks
import small_net
import torch

import gradcomp
from gradcomp.core.requests import Reduce
from gradcomp.networks import horovod as horovod_network
from gradcomp.networks import waits
from gradcomp.networks.waits import Wait


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A clock that a test turns on."""
    now = [1000.0]
    monkeypatch.setattr(waits.time, "monotonic", lambda: now[0])

    def turn(seconds: float) -> None:
        now[0] += seconds

    return turn


LATE = "ranks 1, 3, which may be computing, may have ended, or may not have called gradcomp as this rank did"


@pytest.mark.parametrize(
    ("missing", "whom"), [(None, "the other ranks"), ([3, 1], LATE), ([], "the network: all ranks wait here")]
)
def test_a_long_wait_logs_ever_rarer(
    clock: Callable[[float], None], caplog: pytest.LogCaptureFixture, missing: list[int] | None, whom: str
) -> None:
    wait = Wait(0, "bucket 3, request 1")
    clock(9.9)
    wait.look(missing)
    assert not caplog.records
    clock(0.1)
    for _ in range(3):
        wait.look(missing)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    since = time.strftime("%H:%M:", time.localtime(time.time() - 10))
    said = rf"gradcomp: rank 0 has waited 10 s, since {since}\d\d, in bucket 3, request 1 for {whom}"
    assert re.fullmatch(said, record.message)
    assert wait.seconds_left == 20
    clock(20.0)
    wait.look(missing)
    assert "has waited 30 s" in caplog.records[1].message


def test_a_wait_in_a_meeting_names_the_likeliest_cause_first_and_its_end(
    clock: Callable[[float], None], caplog: pytest.LogCaptureFixture
) -> None:
    wait = Wait(0, waits.MEETING, 1800.0)
    clock(10.0)
    wait.look([1])
    causes = "rank 1, which may not have called gradcomp as this rank did, may have ended, or may be computing"
    assert caplog.records[0].message.endswith(f"{causes}. The timeout ends this wait after 1800 s")
    assert "in attach()" in caplog.records[0].message


# ---- Real ranks


class Said(logging.Handler):
    """Collects what gradcomp logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        waits.log.addHandler(self)
        waits.TELL_AFTER, waits.SPEAK_AFTER = 0.5, 1.0  # type: ignore[misc]

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def since_last(self) -> list[str]:
        lines, self.lines = self.lines, []
        return lines


def horovod() -> dict[str, list[str]]:
    hvd.init()
    said, found = Said(), {}
    model, data = small_net.net(), doors.batches()
    optimizer = doors.sgd(doors.OWN, model, "topk:ratio=0.05")
    for case in ("late to the meeting", "late to a step"):
        hvd.barrier()
        if hvd.rank() == 1:
            time.sleep(2.0)
        small_net.train(model, optimizer, data, 1)
        found[case] = said.since_last()
    return found


def distributed() -> None:
    ranks.join()
    said, found, rank = Said(), {}, torch.distributed.get_rank()
    run = doors.Training(doors.DDP, bucket_mb=0.02)
    if rank == 1:
        time.sleep(2.0)
    gradcomp.ddp.attach(run.whole, "topk:ratio=0.05")
    found["late to the meeting"] = said.since_last()
    run.train(2)  # DDP rebuilds its buckets in the second step, and waits there by itself
    said.since_last()
    if rank == 1:
        time.sleep(2.0)
    run.train(1)
    found["late to a step"] = said.since_last()
    rank_server.report(found)
    rank_server.end_together()


PROGRAMS: dict[str, Callable[[], Any]] = {"horovod": horovod, "torch": distributed}


@ranks.once
def found(network: str) -> list[dict[str, list[str]]]:
    return ranks.launch(PROGRAMS[network], 3)


@pytest.mark.slow
@pytest.mark.parametrize("network", PROGRAMS)
@pytest.mark.parametrize("case", ["late to the meeting", "late to a step"])
def test_ranks_that_wait_log_the_exchange_and_the_late_rank(network: str, case: str) -> None:
    place = waits.MEETING if "meeting" in case else "agreement of the ranks"
    likeliest = "not have called gradcomp" if "meeting" in case else "be computing"
    whom = f"rank 1, which may {likeliest}" if network == "torch" else "the other ranks"
    for rank, own in enumerate(found(network)):
        if rank == 1:
            assert own[case] == []
            continue
        line = own[case][0]
        assert line.startswith(f"gradcomp: rank {rank} has waited 1 s, since "), line
        assert f"in {place} for {whom}" in line, line
        assert ("timeout ends this wait after" in line) == (network == "torch")


# ---- Pauses between two looks at an operation of Horovod: short where a GPU idles meanwhile


class Sent(torch.Tensor):
    """A tensor that says that it lies on a GPU, as Horovod would return one."""

    is_cuda = True


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses of a wait for an operation that ends at the twelfth look."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(hvd, "poll", lambda handle: len(slept) == 12)
    monkeypatch.setattr(hvd, "allreduce_async_", lambda tensor, **options: tensor)
    monkeypatch.setattr(hvd, "synchronize", lambda handle: torch.zeros(1))
    return slept


def wait_for(tensor: Any) -> None:
    alone = SimpleNamespace(rank=lambda: 0, size=lambda: 1, process_set_id=0)
    horovod_network.HorovodNetwork(alone).start(Reduce(tensor, 1.0), "0.0")()


def test_pauses_double_up_to_a_millisecond_for_tensors_in_main_memory(pauses: list[float]) -> None:
    wait_for(torch.zeros(3))
    assert pauses[:3] == [20e-6, 40e-6, 80e-6] and pauses[-1] == 1e-3


def test_a_gpu_never_idles_for_longer_than_a_tenth_of_that(pauses: list[float]) -> None:
    wait_for(torch.zeros(3).as_subclass(Sent))
    assert pauses[:3] == [20e-6, 40e-6, 80e-6] and set(pauses[3:]) == {100e-6}
