"""Measure what a step of ResNet-50 costs the host beside its kernels: Python, the binding, and native calls.

A reducer takes steps on a network that answers at once, with the native calls timed. The time outside native calls is Python's.
A model with layers a ten thousandth as large makes the same calls with nearly no work, so its native calls take the binding's
time. The kernels take the rest of the time with whole layers.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import Counter
from typing import Any, NamedTuple

import torch

from gradcomp.core.requests import Request, World
from gradcomp.engine.reducer import BUCKETS_OF_UPDATES, Options, Reducer
from gradcomp.engine.slots import Slot
from gradcomp.engine.health import INTERVAL
from gradcomp.engine.updates.hidden_momentum import Momentum
from gradcomp.engine.updates.progress import StepRule
from gradcomp.native import extension
from gradcomp.networks import Answer
from gradcomp.prediction.measure import gradients
from gradcomp.prediction.recording_network import RecordingNetwork
from gradcomp.spec import make
from laboratory import machine, options, report
from laboratory.timing import Spread, threads

Shapes = dict[str, tuple[int, ...]]

SPECS = "dense;half;topk;sdagc;orq;bingrad"
BUCKET_MB = 25.0
# The layers of the small model are so much smaller.
SMALLER = 10_000
# Steps before those that count: capacities have settled then, and memory is kept.
SETTLING = 20
RATE, MOMENTUM = 0.1, Momentum(0.9)

EXAMPLES = """\
example:
  scripts/lab host

The 161 parameters of ResNet-50 in buckets of the default size, on one thread, with a network that answers at once."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--specs", type=options.specs, default=SPECS, help=f"separated by semicolons (default: {SPECS})")
    parser.add_argument("--ranks", type=options.positive, default=4, help="(default: 4)")
    parser.add_argument("--steps", type=options.positive, default=200, help="that count (default: 200)")
    options.add_places(parser, "the CPU's model")


@threads(1)
def run(chosen: argparse.Namespace) -> int:
    """Take the steps, and write the table."""
    lines = [of_resnet(spec, chosen.ranks, chosen.steps) for spec in chosen.specs]
    rows = [["", "buckets", "native calls a bucket", "Python ms", "least", "binding ms", "least", "both, least", "kernels ms"]]
    for line in lines:
        times = [line[part][which] for part in ("python_ms", "binding_ms") for which in ("median", "low")]
        both, counted = times[1] + times[3], [str(line["buckets"]), f"{line['calls_a_bucket']:.1f}"]
        rows.append([line["spec"], *counted, *(f"{each:.2f}" for each in (*times, both)), f"{line['kernels_ms']:.0f}"])
    print(report.columns(rows))
    settings = {"ranks": chosen.ranks, "steps": chosen.steps, "bucket_mb": BUCKET_MB}
    report.save(chosen, machine.slug(machine.cpu_name()), {"settings": settings, "lines": lines})
    return 0


def of_resnet(spec: str, ranks: int, count: int) -> dict[str, Any]:
    """Return what a step costs. Steps of the whole model, beside those of the small one, give the kernels' time."""
    small = steps(spec, shrunk(resnet50(), SMALLER), BUCKET_MB / SMALLER, ranks, count)
    large = steps(spec, resnet50(), BUCKET_MB, ranks, max(3, count // 20))
    return {
        "spec": spec,
        "buckets": small.buckets,
        "calls_a_bucket": sum(small.calls.values()) / small.buckets,
        "calls": dict(small.calls),
        "python_ms": {name: 1e3 * value for name, value in small.outside._asdict().items()},
        "binding_ms": {name: 1e3 * value for name, value in small.native._asdict().items()},
        "kernels_ms": 1e3 * max(0.0, large.native.median - small.native.median),
    }


class Native:
    """The extension, with its calls counted and timed. To be put in its place."""

    def __init__(self, real: Any):
        self._real, self.seconds, self.calls = real, 0.0, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._real, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            found = function(*arguments, **options)
            self.seconds += time.perf_counter() - began
            self.calls[name] += 1
            return found

        self.__dict__[name] = timed if callable(function) else function
        return self.__dict__[name]


class Instant(RecordingNetwork):
    """A network that answers at once, as if all ranks had sent the same. seconds: that making the answers took."""

    def __init__(self, world: World):
        super().__init__(world, torch.device("cpu"))
        self.seconds = 0.0

    def start(self, request: Request, name: str) -> Answer:
        """Make the answer."""
        began = time.perf_counter()
        reply = self._reply(request)
        self.seconds += time.perf_counter() - began
        return lambda: reply


class Costs(NamedTuple):
    """Of a step: its buckets, its seconds outside native calls and in them, and the native calls by name.

    calls: the most of a step, but for those that measure the health of residuals (every INTERVAL).
    """

    buckets: int
    outside: Spread
    native: Spread
    calls: Counter[str]


def steps(spec: str, shapes: Shapes, bucket_mb: float, ranks: int, count: int) -> Costs:
    """Take steps on one of some ranks, and return the costs of those that count."""
    network, real = Instant(World(0, ranks, tuple(range(ranks)))), extension.native
    native = extension.native = Native(real)
    outside, inside, calls = [], [], Counter[str]()
    try:
        make_steps = Updates if make(spec).traits.acts_on_updates else Gradients
        taken = make_steps(spec, shapes, network, bucket_mb)
        for step in range(SETTLING + count):
            native.seconds, native.calls, network.seconds = 0.0, Counter(), 0.0
            spent = taken.step()
            if step >= SETTLING:
                inside.append(native.seconds)
                outside.append(spent - native.seconds - network.seconds)
                if (step + 1) % INTERVAL:
                    calls |= native.calls
    finally:
        extension.native = real
    return Costs(len(taken.reducer.buckets), Spread.of(outside), Spread.of(inside), calls)


class Gradients:
    """Exchanges of gradients."""

    def __init__(self, spec: str, shapes: Shapes, network: RecordingNetwork, bucket_mb: float):
        device = torch.device("cpu")
        self._grads = gradients(shapes, device)
        self._slots = {name: Slot(name, grad.shape, device) for name, grad in self._grads.items()}
        for name, slot in self._slots.items():
            slot.update = torch.empty_like(self._grads[name]).view(-1)
        self.reducer = Reducer(make(spec), self._slots, network, Options(bucket_mb=bucket_mb))
        self.reducer.layer_rates = dict.fromkeys(shapes, RATE)

    def step(self) -> float:
        """Take a step, and return its seconds."""
        began = time.perf_counter()
        for name in reversed(self._grads):
            self.reducer.ready(self._slots[name], self._grads[name])
        self.reducer.finish()
        return time.perf_counter() - began


class Updates:
    """Exchanges of updates of an optimizer with momentum, in as many buckets as a model of the whole size has."""

    def __init__(self, spec: str, shapes: Shapes, network: RecordingNetwork, bucket_mb: float):
        device = torch.device("cpu")
        grads = gradients(shapes, device)
        self._weights = {name: torch.nn.Parameter(torch.zeros_like(grad)) for name, grad in grads.items()}
        slots = {name: Slot(name, shapes[name], device, weight) for name, weight in self._weights.items()}
        largest = max(bucket_mb, 4e-6 * sum(map(math.prod, shapes.values())) / BUCKETS_OF_UPDATES)
        self.reducer = Reducer(make(spec), slots, network, Options(bucket_mb=largest), on_updates=True)
        self.reducer.layer_rates = dict.fromkeys(shapes, RATE)
        self._updates = [RATE * grad for grad in grads.values()]

    def step(self) -> float:
        """Take a step, and return its seconds, without those of the optimizer."""
        began = time.perf_counter()
        for bucket in self.reducer.buckets:
            assert bucket.progress is not None
            bucket.progress.rule = StepRule(MOMENTUM)
            bucket.progress.begin()
        copied = time.perf_counter() - began
        with torch.no_grad():
            for weight, update in zip(self._weights.values(), self._updates, strict=True):
                weight.sub_(update)
        began = time.perf_counter()
        self.reducer.run(self.reducer.buckets)
        return copied + time.perf_counter() - began


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
