"""The native calls of a step, as one rank of some takes it on a network that answers at once; and the shapes of ResNet-50."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch

from gradcomp.core.requests import Request, World
from gradcomp.engine.reducer import BUCKETS_OF_UPDATES, Options, Reducer
from gradcomp.engine.slots import Slot
from gradcomp.engine.updates.hidden_momentum import Momentum
from gradcomp.engine.updates.progress import StepRule
from gradcomp.native import extension
from gradcomp.networks import Answer
from gradcomp.prediction.measure import gradients
from gradcomp.prediction.recording_network import RecordingNetwork
from gradcomp.spec import make

Shapes = dict[str, tuple[int, ...]]

# Steps before those that count: capacities have settled then, and memory is kept.
SETTLING = 20
RATE, MOMENTUM, CPU = 0.1, Momentum(0.9), torch.device("cpu")


class Counted:
    """The extension, with its calls counted. To be put in its place."""

    def __init__(self, real: Any):
        self._real, self.calls = real, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._real, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            self.calls[name] += 1
            return function(*arguments, **options)

        self.__dict__[name] = counted if callable(function) else function
        return self.__dict__[name]


class Instant(RecordingNetwork):
    """A network that answers at once, as if all ranks had sent the same."""

    def start(self, request: Request, name: str) -> Answer:
        reply = self._reply(request)
        return lambda: reply


class Gradients:
    """Exchanges of gradients."""

    def __init__(self, spec: str, shapes: Shapes, network: RecordingNetwork, bucket_mb: float):
        self._grads = gradients(shapes, CPU)
        self._slots = {name: Slot(name, grad.shape, CPU) for name, grad in self._grads.items()}
        for name, slot in self._slots.items():
            slot.update = torch.empty_like(self._grads[name]).view(-1)
        self.reducer = Reducer(make(spec), self._slots, network, Options(bucket_mb=bucket_mb))
        self.reducer.context.layer_rates = dict.fromkeys(shapes, RATE)

    def step(self) -> None:
        for name in reversed(self._grads):
            self.reducer.ready(self._slots[name], self._grads[name])
        self.reducer.finish()


class Updates:
    """Exchanges of updates of an optimizer with momentum, in as many buckets as a model of the whole size has."""

    def __init__(self, spec: str, shapes: Shapes, network: RecordingNetwork, bucket_mb: float):
        grads = gradients(shapes, CPU)
        self._weights = {name: torch.nn.Parameter(torch.zeros_like(grad)) for name, grad in grads.items()}
        slots = {name: Slot(name, shapes[name], CPU, weight) for name, weight in self._weights.items()}
        largest = max(bucket_mb, 4e-6 * sum(map(math.prod, shapes.values())) / BUCKETS_OF_UPDATES)
        self.reducer = Reducer(make(spec), slots, network, Options(bucket_mb=largest), on_updates=True)
        self.reducer.context.layer_rates = dict.fromkeys(shapes, RATE)
        self._updates = [RATE * grad for grad in grads.values()]

    def step(self) -> None:
        for bucket in self.reducer.buckets:
            assert bucket.progress is not None
            bucket.progress.rule = StepRule(MOMENTUM)
            bucket.progress.begin()
        with torch.no_grad():
            for weight, update in zip(self._weights.values(), self._updates, strict=True):
                weight.sub_(update)
        self.reducer.run(self.reducer.buckets)


def calls_of(spec: str, shapes: Shapes, bucket_mb: float, ranks: int, count: int) -> tuple[int, Counter[str]]:
    """Take steps. Return the number of buckets, and the most calls of a step by name, of the last so many."""
    network, real = Instant(World(0, ranks, tuple(range(ranks))), CPU), extension.native
    native = extension.native = Counted(real)
    most = Counter[str]()
    try:
        taken = (Updates if make(spec).traits.acts_on_updates else Gradients)(spec, shapes, network, bucket_mb)
        for step in range(SETTLING + count):
            native.calls = Counter()
            taken.step()
            most |= native.calls if step >= SETTLING else Counter()
    finally:
        extension.native = real
    return len(taken.reducer.buckets), most


def resnet50(width: int = 64) -> Shapes:
    """Return names and shapes. width: of the first block; 64 as published."""
    shapes: Shapes = {}

    def convolution(name: str, channels: int, out: int, size: int) -> None:
        norm = name.replace("conv", "bn") if "conv" in name else f"{name[:-1]}1"
        shapes[f"{name}.weight"] = (out, channels, size, size)
        shapes[f"{norm}.weight"] = shapes[f"{norm}.bias"] = (out,)

    convolution("conv1", 3, width, 7)
    channels = width
    for layer, blocks in enumerate((3, 4, 6, 3)):
        inside = width * 2**layer
        for block in range(blocks):
            name = f"layer{layer + 1}.{block}"
            convolution(f"{name}.conv1", channels, inside, 1)
            convolution(f"{name}.conv2", inside, inside, 3)
            convolution(f"{name}.conv3", inside, 4 * inside, 1)
            if block == 0:
                convolution(f"{name}.downsample.0", channels, 4 * inside, 1)
            channels = 4 * inside
    classes = 1000 * width // 64
    return shapes | {"fc.weight": (classes, channels), "fc.bias": (classes,)}


def shrunk(shapes: Shapes, by: int) -> Shapes:
    """Divide the entries of each layer, and keep its dimensions' number."""
    return {name: (max(1, math.prod(shape) // by), *(1 for _ in shape[1:])) for name, shape in shapes.items()}
