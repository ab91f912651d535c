"""Measures a spec here: one rank's steps with random gradients on a recording network, bucket by bucket."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from gradcomp.core.by_layer import ByLayer
from gradcomp.core.compressor import Compressor
from gradcomp.core.requests import World
from gradcomp.engine.optimizer_view import FixedRates
from gradcomp.engine.reducer import Options, Reducer
from gradcomp.engine.slots import Slots, TensorSlot
from gradcomp.engine.stages.feedback import Feedback
from gradcomp.prediction.recording_network import Part, RecordingNetwork
from gradcomp.spec import make


class Effort(NamedTuple):
    """The steps of a measurement. settling: those before the ones that count, since capacities follow counts some steps later.

    counted: those that count, at least. seconds: time for more.
    """

    settling: int = 12
    counted: int = 3
    seconds: float = 0.5


EFFORT = Effort()
# Enough to see messages, where a profile has the seconds.
MESSAGES = Effort(counted=1, seconds=0.0)

# The learning rate of all layers.
RATE = 0.1

# Of a large world, a gather's reply holds as many payloads as fit these bytes; the rest of the time follows from two sizes.
HELD = 32e6


class Bucket(NamedTuple):
    """The layers of a bucket, in the order of the model, and its parts."""

    names: tuple[str, ...]
    parts: tuple[Part, ...]


def device_wait(device: torch.device) -> Callable[[], None]:
    """Return a function that waits for the device."""
    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)


def gradients(
    shapes: Mapping[str, Sequence[int]], device: torch.device, types: Mapping[str, torch.dtype] | None = None
) -> dict[str, Tensor]:
    """Draw gradients whose layers differ in size, as those of nets do. types: by layer, float32 by default."""
    generator = torch.Generator().manual_seed(0)
    made = {}
    for name, shape in shapes.items():
        scale = float(torch.empty(1).log_normal_(0, 1, generator=generator))
        drawn = torch.empty(tuple(shape)).log_normal_(0, 1, generator=generator)
        sign = torch.empty(tuple(shape)).uniform_(-1, 1, generator=generator).sign_()
        made[name] = drawn.mul_(sign).mul_(scale).to(device, (types or {}).get(name, torch.float32))
    return made


def measure(
    spec: str,
    shapes: Mapping[str, Sequence[int]],
    world: World,
    bucket_mb: float,
    device: torch.device,
    effort: Effort | None = None,
    types: Mapping[str, torch.dtype] | None = None,
) -> list[Bucket]:
    """Let a rank do some steps, as after a warm-up. Return its buckets, in the order in which backward fills them."""
    grads, effort = gradients(shapes, device, types), effort or EFFORT
    network = RecordingNetwork(world, device_wait(device), HELD)
    every = _steps(spec, grads, network, bucket_mb, device, effort)
    if not any(0 < part.payloads < world.size for _, steps in every for parts in steps for part in parts):
        return [Bucket(names, _means(steps)) for names, steps in every]
    network = RecordingNetwork(world, device_wait(device), HELD / 4, least=1)
    fewer = _steps(spec, grads, network, bucket_mb, device, effort)
    found = []
    for (names, steps), (_, short) in zip(every, fewer, strict=True):
        parts = zip(_means(steps), _means(short), strict=True)
        found.append(Bucket(names, tuple(_extended(*each, world.size) for each in parts)))
    return found


def without_warmup(compressor: Compressor) -> Compressor:
    """Take the warm-up out: its steps are few, and send more than those that follow."""
    match compressor:
        case Feedback():
            return replace(compressor, warmup=0)
        case ByLayer(rules, default):
            return ByLayer(tuple((pattern, without_warmup(each)) for pattern, each in rules), without_warmup(default))
    return compressor


def _steps(
    spec: str, grads: Mapping[str, Tensor], network: RecordingNetwork, bucket_mb: float, device: torch.device, effort: Effort
) -> list[tuple[tuple[str, ...], list[list[Part]]]]:
    """Return the parts of each bucket, step by step."""
    slots = {name: TensorSlot(name, grad.shape, device) for name, grad in grads.items()}
    for name, slot in slots.items():
        slot.update = torch.empty_like(grads[name]).view(-1)
    view = FixedRates(Slots([*slots.values()]), RATE)
    reducer = Reducer(without_warmup(make(spec)), slots, network, Options(bucket_mb=bucket_mb), view)
    bucket_of = {name: bucket.index for bucket in reducer.buckets for name in bucket.layout.names}
    counted: list[dict[int, list[Part]]] = []
    began = 0.0
    for step in range(10**6):
        if step == effort.settling:
            began = time.perf_counter()
        if step >= effort.settling + effort.counted and time.perf_counter() - began >= effort.seconds:
            break
        network.parts = {}
        for name in reversed(list(grads)):
            network.begin(bucket_of[name])
            reducer.ready(slots[name], grads[name])
        reducer.start_all()
        while reducer.advance():
            pass
        network.close()
        reducer.end_step()
        if step >= effort.settling:
            counted.append(network.parts)
    return [(bucket.layout.names, [parts[bucket.index] for parts in counted]) for bucket in reducer.buckets]


def _means(steps: Sequence[Sequence[Part]]) -> tuple[Part, ...]:
    """Take the mean of every part's seconds over the steps that sent as the last one did, and its message in that one.

    The mean: where ranks share cores, only some runs of a short kernel wait for one, and a median knows nothing of them.
    """
    kinds = [[part.message and part.message.kind for part in parts] for parts in steps]
    alike = [parts for parts, own in zip(steps, kinds, strict=True) if own == kinds[-1]]
    return tuple(
        parts[-1]._replace(seconds=statistics.fmean(part.seconds for part in parts)) for parts in zip(*alike, strict=True)
    )


def _extended(long: Part, short: Part, ranks: int) -> Part:
    """Extend a part's time to the payloads of all ranks."""
    if long.payloads in (0, ranks) or long.payloads == short.payloads:
        return long
    each = max(0.0, (long.seconds - short.seconds) / (long.payloads - short.payloads))
    return long._replace(seconds=long.seconds + each * (ranks - long.payloads))
