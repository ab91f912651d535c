"""Streams that have work on a bucket are waited for, and a capture waits for none outside it: on a GPU that only takes notes.

tests/test_cuda.py has the same on a GPU, which CI has not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from stand_in import OnGpu, StandIn
from torch import Tensor

from gradcomp.core.requests import Gather, Reduce, Send
from gradcomp.engine.reducer import Options, Reducer
from gradcomp.engine.slots import Slot
from gradcomp.messages.payload import wrap
from gradcomp.native import extension
from gradcomp.native.memory import HostCopy
from gradcomp.native.streams import Streams
from gradcomp.networks.memory import Board, MemoryNetwork
from gradcomp.networks.torch import TorchNetwork
from gradcomp.spec import make

GPU = torch.device("cuda", 0)


class Stream:
    """A stream that notes the streams it waits for."""

    def __init__(self, handle: int, captured: bool = False):
        self.cuda_stream, self.captured = handle, captured
        self.waited_for: list[int] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited_for.append(other.cuda_stream)


class Device:
    """A GPU's current stream, as torch.cuda has it."""

    def __init__(self) -> None:
        self.current = Stream(0)
        self.asked = 0

    def current_stream(self, device: object) -> Stream:
        self.asked += 1
        return self.current

    @contextlib.contextmanager
    def stream(self, other: Stream) -> Iterator[None]:
        before, self.current = self.current, other
        yield
        self.current = before

    def is_current_stream_capturing(self) -> bool:
        return self.current.captured


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    for name in ("current_stream", "stream", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, getattr(made, name))
    monkeypatch.setattr(extension, "current_stream", lambda index: made.current.cuda_stream)
    return made


def test_the_stream_that_goes_on_waits_for_each_of_the_others_once(device: Device) -> None:
    own, busy = Streams(GPU), [Stream(handle) for handle in (1, 2, 3)]
    for at in (0, 1, 0, 0, 1, 2):
        device.current = busy[at]
        own.note()
    own.join()
    assert [stream.waited_for for stream in busy] == [[], [], [1, 2]]
    device.current = busy[0]
    own.join()  # the next round, on another stream: the last round's is waited for, and no other
    assert busy[0].waited_for == [3]
    own.clear()
    device.current = busy[1]
    own.join()
    assert busy[1].waited_for == []


def test_a_stream_is_asked_for_once_and_then_told_by_its_handle(device: Device) -> None:
    own = Streams(GPU)
    for _ in range(100):
        own.note()
    assert device.asked == 1


def test_a_capture_waits_for_its_own_streams_alone(device: Device) -> None:
    outside, forked, capturing = Stream(1), Stream(2, captured=True), Stream(3, captured=True)
    own = Streams(GPU)
    for device.current in (outside, forked, capturing):
        own.note()
    own.join()
    assert capturing.waited_for == [2]


@pytest.mark.parametrize("spec", ["topk:ratio=0.5", "sdagc"])
def test_a_bucket_waits_for_its_gradients_before_it_reads_them(
    device: Device, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first kernel of a bucket runs on the stream of the last gradient, the rest on that of step()."""
    slots = {name: Slot(name, (8,), torch.device("cpu")) for name in "abc"}
    reducer = Reducer(make(spec), slots, MemoryNetwork(Board(1), 0, 1), Options())
    (bucket,) = reducer.buckets
    bucket.streams = Streams(GPU)  # its arrays lie in main memory all the same
    read_on: list[Any] = []
    collect = bucket.collect

    def noted(context: Any) -> Any:
        read_on.append((device.current.cuda_stream, [*device.current.waited_for]))
        return collect(context)

    monkeypatch.setattr(bucket, "collect", noted)
    hooks, stepping = [Stream(handle) for handle in (1, 2, 3)], Stream(4)
    for device.current, name in zip(hooks, "abc", strict=True):
        reducer.ready(slots[name], Tensor([1.0] * 8))
    assert read_on == [(3, [1, 2])]
    device.current = stepping
    reducer.finish()
    assert stepping.waited_for == [3] and bucket.streams._busy == {}


class OnSecond(OnGpu):
    """A tensor that says that it is on the second GPU."""

    device = torch.device("cuda", 1)  # type: ignore[assignment]


def test_a_copy_to_the_host_is_noted_on_the_stream_of_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on that of the current device, which has no work of the copy."""
    streams, noted = [Stream(1), Stream(2)], list[Stream]()
    event = SimpleNamespace(record=lambda stream=streams[0]: noted.append(stream))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[device.index])
    with StandIn():
        HostCopy(torch.ones(3).as_subclass(OnSecond))
    assert noted == streams[1:]


@pytest.mark.parametrize("moves_on", [False, True])
@pytest.mark.parametrize("kind", [Gather, Reduce, Send])
def test_what_was_received_is_kept_until_the_stream_that_reads_it_has_done_so(
    group_of_one: None, device: Device, kind: type, moves_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is the beginning's, on which it would serve again as soon as the reader lets it go."""
    kept: list[Stream] = []
    monkeypatch.setattr(OnGpu, "record_stream", lambda received, stream: kept.append(stream))
    first = torch.ones(4, dtype=torch.uint8 if kind is Gather else torch.float32).repeat(2).as_subclass(OnGpu)
    payload = wrap(first)
    requests: dict[type, Any] = {Gather: lambda: Gather(payload), Reduce: lambda: Reduce(first, 1.0)}
    requests[Send] = lambda: Send({0: payload}, (0,), payload.form, torch.device("cpu"))
    assert dist.group.WORLD is not None
    network = TorchNetwork(dist.group.WORLD, torch.device("cpu"))
    answer = network.start(requests[kind](), "an exchange")
    if moves_on:
        device.current = Stream(5)
    answer()
    assert kept == [device.current] * moves_on
