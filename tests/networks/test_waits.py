"""A rank that waits long says for whom, in which exchange and since when, under Horovod and DDP."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import doors
import horovod.torch as hvd
import pytest
import rank_server
import ranks
import small_net
import torch
from ddp_run import DdpRun

import gradcomp
from gradcomp.core.requests import World
from gradcomp.networks import waits
from gradcomp.networks.waits import Wait

MEETING = waits.MEETING


def test_the_exchanges_of_auto_have_their_own_place() -> None:
    assert waits.place_of("auto.figures 2") == "auto's choice (figures 2)"


class FakeNotes(dict[int, str]):
    """Notes that a test writes."""

    def __init__(self, readable: bool = True, **notes: str):
        super().__init__({int(rank.strip("_")): text for rank, text in notes.items()})
        self.written: list[str] = []
        self.readable = readable

    def write(self, text: str) -> None:
        self.written.append(text)

    def read(self) -> Mapping[int, str] | None:
        return self if self.readable else None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A clock that a test turns on."""
    now = [1000.0]
    monkeypatch.setattr(waits.time, "monotonic", lambda: now[0])

    def turn(seconds: float) -> None:
        now[0] += seconds

    return turn


def test_a_short_wait_is_silent(clock: Callable[[float], None], caplog: pytest.LogCaptureFixture) -> None:
    notes = FakeNotes()
    with Wait(notes, World(0, 2), "0.0") as wait:
        assert wait.next_look == 5
        clock(4.9)
        wait.look()
    assert not notes.written and not caplog.records


def test_a_long_wait_leaves_a_note_speaks_and_takes_the_note_back(
    clock: Callable[[float], None], caplog: pytest.LogCaptureFixture
) -> None:
    notes = FakeNotes(_2="bucket 3, request 1", _3=MEETING, _4="")
    wait = Wait(notes, World(0, 5), "3.1")
    clock(5.0)
    wait.look()
    assert notes.written == ["bucket 3, request 1"] and wait.next_look == 5
    clock(5.0)
    for _ in range(3):
        wait.look()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    since = time.strftime("%H:%M:", time.localtime(time.time() - 10))
    assert re.fullmatch(
        rf"gradcomp: rank 0 has waited 10 s, since {since}\d\d, in bucket 3, request 1 for ranks 1, 3, 4; "
        rf"rank 3 waits in {re.escape(MEETING)}; ranks 1, 4 may be computing, may have ended, or may not have called gradcomp "
        r"as this rank did",
        record.message,
    )
    assert wait.next_look == 20
    clock(20.0)
    wait.look()
    assert "has waited 30 s" in caplog.records[1].message
    with pytest.raises(ValueError, match="the network failed"), wait:
        raise ValueError("the network failed")
    assert notes.written == ["bucket 3, request 1", ""]


def test_what_is_said_where_nothing_or_everything_is_known(
    clock: Callable[[float], None], caplog: pytest.LogCaptureFixture
) -> None:
    for notes in (FakeNotes(readable=False), FakeNotes(_1="bucket 0, request 0")):
        wait = Wait(notes, World(0, 2), "0.0")
        clock(11.0)
        wait.look()
    unknown, together = (record.message for record in caplog.records)
    assert unknown.endswith("in bucket 0, request 0 for the other ranks")
    assert together.endswith("for the network: all ranks wait here")


# ---- Real ranks


class GivenUpError(Exception):
    """Ends a wait that would never end."""


class Said(logging.Handler):
    """Collects what gradcomp logs. If told to, ends a wait that speaks again: the others have spoken by then."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.give_up = False
        waits.log.addHandler(self)
        waits.NOTE_AFTER, waits.SPEAK_AFTER = 0.5, 1.0  # type: ignore[misc]

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        if self.give_up and len(self.lines) > 1:
            raise GivenUpError

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
    found["change() alone"] = alone(said, hvd.rank(), optimizer.compression, lambda: small_net.train(model, optimizer, data, 1))
    return found


def distributed() -> None:
    ranks.join()
    said, found, rank = Said(), {}, torch.distributed.get_rank()
    run = DdpRun(None)
    if rank == 1:
        time.sleep(2.0)
    handle = gradcomp.ddp.attach(run.whole, "topk:ratio=0.05")
    found["late to the meeting"] = said.since_last()
    run.train(2)  # DDP rebuilds its buckets in the second step, and waits there by itself
    said.since_last()
    if rank == 1:
        time.sleep(2.0)
    run.train(1)
    found["late to a step"] = said.since_last()
    found["change() alone"] = alone(said, rank, handle, lambda: run.train(1))
    rank_server.report(found)
    rank_server.end_together()


def alone(said: Said, rank: int, handle: Any, train: Callable[[], Any]) -> list[str]:
    """Change the spec on rank 0 alone, and go on training on the others: all wait for ever."""
    said.give_up = True
    with contextlib.suppress(GivenUpError):
        if rank == 0:
            handle.change("topk:ratio=0.1")
        else:
            train()
    return said.since_last()


PROGRAMS = {"horovod": horovod, "torch": distributed}


@ranks.once
def found(network: str) -> list[dict[str, list[str]]]:
    return ranks.launch(PROGRAMS[network], 3)


@pytest.mark.slow
@pytest.mark.parametrize("network", PROGRAMS)
@pytest.mark.parametrize("case", ["late to the meeting", "late to a step"])
def test_ranks_that_wait_name_the_late_one(network: str, case: str) -> None:
    place = MEETING if "meeting" in case else "bucket 0, request 0"
    for rank, own in enumerate(found(network)):
        if rank == 1:
            assert own[case] == []
            continue
        line = own[case][0]
        assert line.startswith(f"gradcomp: rank {rank} has waited 1 s, since "), line
        assert f"in {place}" in line and line.endswith(
            "rank 1 may be computing, may have ended, or may not have called gradcomp as this rank did"
        ), line


@pytest.mark.slow
@pytest.mark.parametrize("network", PROGRAMS)
def test_a_change_on_one_rank_alone_is_named_by_all(network: str) -> None:
    first, *others = (own["change() alone"][0] for own in found(network))
    assert f"in {waits.MEETING} for ranks 1, 2; rank 1 waits in bucket 0" in first
    for line in others:
        assert f"in bucket 0, request 0 for rank 0; rank 0 waits in {waits.MEETING}" in line
