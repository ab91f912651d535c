"""What a step asks of a GPU beside its bytes: launches, counted on the emulator, few calls, and never to be waited for."""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from typing import Any

import pytest
import torch
from stand_in import stand_in
from torch import nn
from torch.optim import SGD, AdamW
from torch.utils._python_dispatch import TorchDispatchMode

import gradcomp
from gradcomp.messages.sparse import Codec
from gradcomp.native import extension
from gradcomp.native.memory import DELAY
from laboratory.commands.host import resnet50

# Launches in a step, for each bucket.
MOST = 30
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


class Noted:
    """Native functions whose calls are counted."""

    def __init__(self, real: Any, calls: Counter[str]):
        self._real, self._calls = real, calls

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)
        self._calls[name] += callable(found) and not name.endswith("_scratch")  # those ask the extension alone
        return found


CASES = [
    *((spec, 1, None) for spec in SPECS),
    ("topk", 5, None),
    ("orq:route=allgather", 5, None),
    ("topk", 1, (SGD, {"momentum": 0.9})),
    ("topk", 1, (SGD, {"momentum": 0.9, "weight_decay": 5e-4})),
    ("topk", 1, (SGD, {"momentum": 0.9, "weight_decay": 5e-4, "nesterov": True})),
    ("topk", 1, (AdamW, {})),
]


@pytest.mark.parametrize("buckets", [1, 5])
@pytest.mark.parametrize("spec, ranks, optimizer", CASES)
def test_a_step_of_a_resnet_50_takes_few_launches(
    spec: str, ranks: int, optimizer: Any, buckets: int, emulator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each rank, however many payloads it adds up, layers whose weights decay, and at the default size of a bucket."""
    monkeypatch.setattr(extension, "native", emulator)
    monkeypatch.setattr(Codec, "check", lambda *arguments: None)  # looks at the update, on CPUs alone
    launches = ctypes.CDLL(emulator.__file__).simt_launches
    launches.restype = ctypes.c_uint64
    shapes = resnet50(4)
    weights = {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    stepped = optimizer and optimizer[0](weights.values(), lr=0.1, **optimizer[1])
    options: dict[str, Any] = {"optimizer": stepped, "named_parameters": weights.items()} if optimizer else {}
    size_mb = 4e-6 * sum(map(math.prod, shapes.values()))
    simulation = gradcomp.Simulation(
        spec, shapes, ranks, bucket_mb=size_mb if buckets == 1 else DEFAULT_SHARE * size_mb, **options
    )
    assert len(simulation._reducers[0].buckets) == buckets  # after stats(), steps measure the norm of gradients, too
    grads = [{name: torch.randn(shape) for name, shape in shapes.items()} for _ in range(ranks)]
    for _ in range(3 if ranks == 1 else 1):
        updates = simulation.step(grads)
        for name, weight in weights.items():
            weight.grad = updates[name]
        if stepped is not None:
            stepped.step()
    before = launches()
    with Operations() as torchs:
        simulation.step(grads)
    ours = launches() - before
    others = {name: count for name, count in torchs.seen.items() if name not in ONLY_LOOK}
    if ranks > 1:
        del others["equal"]  # by which the simulator compares what the ranks come to
    assert ours > 0 and ours + sum(others.values()) <= MOST * ranks * buckets, f"{ours} of gradcomp's, and {others}"
    assert not WAIT & set(others), others


# A bucket's launches: those of gradcomp's kernels, and torch's. The aim is 6 of topk and sdagc, and 4 of orq.
LAUNCHES = {"dense": (4, 1), "topk": (13, 0), "sdagc": (17, 0), "sdagc:lam=2": (16, 2), "orq": (7, 1), "bingrad": (7, 1)}
# A bucket's other calls of CUDA. Each native call asks for the current device.
MOST_CALLS = 10


@pytest.mark.parametrize("spec", LAUNCHES)
def test_a_bucket_asks_little_of_a_gpu(spec: str, emulator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = ctypes.CDLL(emulator.__file__).simt_launches
    launches.restype = ctypes.c_uint64
    shapes = {f"w{i}": (70,) for i in range(9)}
    with stand_in(emulator, monkeypatch) as gpu:
        simulation = gradcomp.Simulation(spec, shapes, 1, bucket_mb=4e-6 * 3 * 70, device="cuda")
        kernels, native = extension.native, Counter[str]()
        grads = [{name: torch.randn(shape, device="cuda") for name, shape in shapes.items()}]
        for _ in range(DELAY + 1):
            simulation.step(grads)
        gpu.calls.clear()
        before = launches()
        with monkeypatch.context() as patch, Operations() as torchs:  # undone before the stand-in's own
            patch.setattr(extension, "native", Noted(kernels, native))
            simulation.step(grads)
    buckets = len(simulation._reducers[0].buckets)
    assert buckets == 3
    ours, others = launches() - before, {name: count for name, count in torchs.seen.items() if name not in ONLY_LOOK}
    assert ours / buckets <= LAUNCHES[spec][0] and sum(others.values()) / buckets <= LAUNCHES[spec][1], (ours, others)
    calls = gpu.calls + native
    assert native and sum(calls.values()) <= MOST_CALLS * buckets, calls
    assert not calls.keys() & {"current_stream", "wait_stream", "Event", "pinned memory"}, calls  # all are made once
