"""What a step asks of a GPU beside its bytes: launches, counted on the emulator, few calls, and never to be waited for."""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from native_calls import resnet50
from stand_in import GPU, stand_in
from torch import nn
from torch.optim import SGD, AdamW
from torch.utils._python_dispatch import TorchDispatchMode

import gradcomp
from gradcomp.core.requests import Request
from gradcomp.engine.phases import Door
from gradcomp.engine.reducer import BUCKETS_OF_UPDATES, Options
from gradcomp.engine.session import Session
from gradcomp.engine.slots import Parameters
from gradcomp.engine.updates import step_exchange
from gradcomp.engine.updates.adam_noise import INTERVAL
from gradcomp.messages.sparse import Codec
from gradcomp.native import extension
from gradcomp.native.memory import DELAY
from gradcomp.networks import Answer
from gradcomp.networks.memory import Board, MemoryNetwork
from gradcomp.prediction.recording_network import RecordingNetwork
from laboratory.gpu.gpt_steps import Gpt, Shape

# Launches in a step, for each bucket.
MOST = 30
# Steps of which the first may wait for the GPU: they make state.
FIRST_STEPS = 3
# A bucket of the default size beside a ResNet-50, of which the net here is a small copy.
DEFAULT_SHARE = 25e6 / (4 * 25_557_032)
# The other compressors do arithmetic of their own in torch between kernels.
SPECS = [
    "dense",
    "topk",
    "topk:momentum=0.9",
    "sdagc",
    "bingrad:route=allgather",
    "orq:route=allgather",
    "qsgd:route=allgather",
    "sign:route=allgather",
]

ONLY_LOOK = {"alias", "as_strided", "detach", "expand", "select", "slice", "split", "split_with_sizes", "squeeze", "t"} | {
    "transpose", "unbind", "unsqueeze", "view", "empty", "empty_like", "empty_strided", "new_empty", "_unsafe_view"
}  # fmt: skip
WAIT = {"_local_scalar_dense", "nonzero", "unique", "_unique2", "masked_select", "is_nonzero", "equal"}


def test_the_net_is_the_published_one() -> None:
    shapes = resnet50()
    assert len(shapes) == 161 and sum(map(math.prod, shapes.values())) == 25_557_032


class Operations(TorchDispatchMode):
    """Counts what torch would do on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[operation._schema.name.removeprefix("aten::")] += 1
        return operation(*args, **(kwargs or {}))


@contextmanager
def counted(emulator: Any) -> Iterator[list[Any]]:
    """Count gradcomp's launches, and torch's operations by name. The list has both at the end."""
    launches = ctypes.CDLL(emulator.__file__).simt_launches
    launches.restype = ctypes.c_uint64
    before, found = launches(), list[Any]()
    with Operations() as torchs:
        yield found
    found[:] = launches() - before, Counter({name: count for name, count in torchs.seen.items() if name not in ONLY_LOOK})


class Noted:
    """Native functions whose calls are counted."""

    def __init__(self, real: Any, calls: Counter[str]):
        self._real, self._calls = real, calls

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)
        self._calls[name] += callable(found) and not name.endswith("_scratch")  # those ask the extension alone
        return found


Shapes = Mapping[str, Sequence[int]]


class Alike(MemoryNetwork):
    """The network of a rank whose messages are answered as if all had sent the same."""

    def __init__(self, ranks: int, device: torch.device):
        super().__init__(Board(ranks), 0, 1)
        self.device = device
        self._replies = RecordingNetwork(self.world, device)

    def start(self, request: Request, name: str) -> Answer:
        reply = self._replies._reply(request)
        return lambda: reply


def exchange_of(spec: str, shapes: Shapes, ranks: int, bucket_mb: float, device: torch.device) -> tuple[Session, Any]:
    """Return a session of one of so many ranks, and what it does in a step: with gradients, or after an optimizer's step."""
    named = {name: nn.Parameter(torch.randn(*shape, device=device)) for name, shape in shapes.items()}
    door, optimizer = Door(has_optimizers=True), SGD(named.values(), lr=0.1, momentum=0.9)
    session = Session(gradcomp.make(spec), Parameters(named.items()), Alike(ranks, device), Options(bucket_mb=bucket_mb), door)
    grads = [torch.randn(slot.layer.size, device=device) for slot in session.slots.slots]

    def before() -> None:
        session.gradients.begin()
        if session.reducer.on_updates:
            session.updates.note_backward()
            session.updates.before(optimizer)
            with torch.no_grad():
                for parameter in named.values():
                    parameter.sub_(0.01)

    def step() -> None:
        if session.reducer.on_updates:
            session.updates.after(optimizer)
        else:
            session.gradients.ready_all(session.slots.slots, grads)
            session.gradients.finish()

    return session, (before, step)


@pytest.mark.parametrize("buckets", [1, 5])
@pytest.mark.parametrize("spec, ranks", [*((spec, 1) for spec in SPECS), ("topk", 5), ("orq:route=allgather", 5)])
def test_a_step_of_a_resnet_50_takes_few_launches(
    spec: str, ranks: int, buckets: int, emulator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many payloads a rank adds up."""
    monkeypatch.setattr(extension, "native", emulator)
    monkeypatch.setattr(Codec, "check", lambda *arguments: None)  # looks at the update, on CPUs alone
    shapes = resnet50(4)
    size_mb = 4e-6 * sum(map(math.prod, shapes.values()))
    share = 1 if buckets == 1 else DEFAULT_SHARE
    session, (before, step) = exchange_of(spec, shapes, ranks, share * size_mb, torch.device("cpu"))
    assert len(session.reducer.buckets) == buckets
    for _ in range(3):
        before()
        step()
    before()
    with counted(emulator) as counts:
        step()
    ours, others = counts
    assert ours > 0 and ours + sum(others.values()) <= MOST * buckets, f"{ours} of gradcomp's, and {others}"
    assert not (WAIT - {"_local_scalar_dense"}) & set(others), others  # records of a CPU are looked at, at once


# A GPT-2's layers, narrower, in DDP's 13 buckets.
GPT, DDP_BUCKETS = Shape(16, 12, 2, 512, 64, 1), 13
# What a step asks of a GPU more than DDP's: kernels, and torch's operations; and a comparison of Adam's noise, for each bucket.
MORE_THAN_DDP, OF_COMPARISON = {"topk": 70, "sdagc": 75, "orq": 85}, 36


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("spec", MORE_THAN_DDP)
@pytest.mark.parametrize("optimizer_of", [partial(SGD, lr=0.1, momentum=0.9), partial(AdamW, lr=0.1)])
def test_a_step_of_a_gpt_takes_few_operations_more_than_ddps(
    spec: str, ranks: int, optimizer_of: Any, emulator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The optimizer's operations are its own. Nothing waits, also not where ranks compare Adam's noise."""
    monkeypatch.setattr(step_exchange, "FIRST_COMPARED", ())  # with its digests of all weights, in one step of a thousand
    shapes = {name: each.shape for name, each in Gpt(GPT).named_parameters()}
    with stand_in(emulator, monkeypatch) as gpu:
        named = {name: nn.Parameter(torch.randn(shape, device="cuda")) for name, shape in shapes.items()}
        optimizer, door = optimizer_of(named.values()), Door(has_optimizers=True)
        size_mb = 4e-6 * sum(map(math.prod, shapes.values()))
        options = Options(bucket_mb=size_mb / BUCKETS_OF_UPDATES)
        session = Session(gradcomp.make(spec), Parameters(named.items()), Alike(ranks, GPU), options, door)
        buffers = [torch.randn(1000, device="cuda") for _ in range(DDP_BUCKETS)]
        for step in range(INTERVAL + 2):
            gpu.waits.clear()
            with counted(emulator) as of_backward:
                session.gradients.begin()
                for buffer in buffers:
                    session.updates.gradients.add((buffer,))
                if (poison := session.updates.end_backward()) is not None:
                    buffers[-1][:1].add_(poison)
                session.updates.note_backward()
            with counted(emulator) as of_start:
                momentum = session.updates.before(optimizer)
                assert momentum is not None
                momentum.hide()
            with torch.no_grad():
                for parameter in named.values():
                    parameter.sub_(0.01)
            with counted(emulator) as of_exchange:
                session.updates.after(optimizer)
            if step < FIRST_STEPS:
                continue
            parts = (of_backward, of_start, of_exchange)
            found = Counter({"gradcomp": sum(ours for ours, _ in parts)}) + sum((others for _, others in parts), Counter())
            compares = step == INTERVAL and ranks > 1 and isinstance(optimizer, AdamW)
            most = MORE_THAN_DDP[spec] + compares * OF_COMPARISON * len(session.reducer.buckets)
            assert gpu.waits == [] and 0 < found.total() <= most, found


# A bucket's launches: those of gradcomp's kernels, and torch's.
LAUNCHES = {"dense": (4, 1), "topk": (4, 0), "sdagc": (5, 0), "sdagc:lam=2": (5, 2), "orq": (5, 2), "bingrad": (5, 1)}
LAUNCHES |= {"blocks": (4, 1)}
# A bucket's other calls of CUDA. Each native call asks for the current device.
MOST_CALLS = 10


@pytest.mark.parametrize("spec", LAUNCHES)
def test_a_bucket_asks_little_of_a_gpu(spec: str, emulator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = ctypes.CDLL(emulator.__file__).simt_launches
    launches.restype = ctypes.c_uint64
    shapes = {f"w{i}": (70,) for i in range(9)}
    with stand_in(emulator, monkeypatch) as gpu:
        session, (start, step) = exchange_of(spec, shapes, 1, 4e-6 * 3 * 70, GPU)
        kernels, native = extension.native, Counter[str]()
        for _ in range(DELAY + 1):
            start()
            step()
        start()
        gpu.calls.clear()
        before = launches()
        with monkeypatch.context() as patch, Operations() as torchs:  # undone before the stand-in's own
            patch.setattr(extension, "native", Noted(kernels, native))
            step()
    buckets = len(session.reducer.buckets)
    assert buckets == 3
    ours, others = launches() - before, {name: count for name, count in torchs.seen.items() if name not in ONLY_LOOK}
    assert ours / buckets <= LAUNCHES[spec][0] and sum(others.values()) / buckets <= LAUNCHES[spec][1], (ours, others)
    calls = gpu.calls + native
    assert native and sum(calls.values()) <= MOST_CALLS * buckets, calls
    assert not calls.keys() & {"wait_stream", "Event", "pinned memory"}, calls  # all are made once
    assert calls["current_stream"] == calls["record"], calls  # torch's own record() asks for it, too
