"""A trial: one rank's steps with random gradients on a mirror. What it computes and sends, bucket by bucket."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from gradcomp.core.by_layer import ByLayer
from gradcomp.core.compressor import Compressor, Layer
from gradcomp.core.requests import World
from gradcomp.engine.optimizers.own_momentum import OwnMomentum
from gradcomp.engine.stages.feedback import Feedback
from gradcomp.engine.steps.reducer import Reducer
from gradcomp.prediction.mirror import Message, Mirror, Note
from gradcomp.spec import make


class Effort(NamedTuple):
    """The steps of a trial. settling: those before the ones that count, since capacities follow counts some steps later.

    counted: those that count, at least. seconds: time for more.
    """

    settling: int = 12
    counted: int = 3
    seconds: float = 0.5


EFFORT = Effort()

# The learning rate of all layers.
RATE = 0.1

# Of a large world, a gather's reply holds as many payloads as fit these bytes; the rest of the time follows from two sizes.
HELD = 32e6


class Part(NamedTuple):
    """What a rank computes, in seconds, and the message that it sends then. The last part of a bucket has none."""

    seconds: float
    message: Message | None


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


def try_out(
    spec: str,
    shapes: Mapping[str, Sequence[int]],
    world: World,
    bucket_mb: float,
    device: torch.device,
    effort: Effort | None = None,
    types: Mapping[str, torch.dtype] | None = None,
    momentum: OwnMomentum | None = None,
    between: Callable[[], object] = lambda: None,
) -> list[Bucket]:
    """Let a rank do some steps, as after a warm-up. Return its buckets, in the order in which backward fills them.

    momentum: that of an optimizer, to be taken over. between: called before each step, outside of what is timed.
    """
    grads, effort = gradients(shapes, device, types), effort or EFFORT
    every = _steps(spec, grads, world, bucket_mb, device, effort, HELD, momentum, between)
    if not any(0 < note.payloads < world.size for _, notes in every for step in notes for note in step):
        return [Bucket(names, _parts(steps)) for names, steps in every]
    fewer = _steps(spec, grads, world, bucket_mb, device, effort, HELD / 4, momentum, between, least=1)
    found = []
    for (names, steps), (_, short) in zip(every, fewer, strict=True):
        parts = zip(_parts(steps), _parts(short), steps[-1], short[-1], strict=True)
        found.append(Bucket(names, tuple(_extended(*each, world.size) for each in parts)))
    return found


def _extended(long: Part, short: Part, of_long: Note, of_short: Note, ranks: int) -> Part:
    """Extend a part's time to the payloads of all ranks."""
    if of_long.payloads in (0, ranks) or of_long.payloads == of_short.payloads:
        return long
    each = max(0.0, (long.seconds - short.seconds) / (of_long.payloads - of_short.payloads))
    return long._replace(seconds=long.seconds + each * (ranks - of_long.payloads))


def _parts(steps: Sequence[Sequence[Note]]) -> tuple[Part, ...]:
    """Take the mean of every part's seconds over the steps that sent as the last one did, and its message in that one.

    The mean: where ranks share cores, only some runs of a short kernel wait for one, and a median knows nothing of them.
    """
    alike = [notes for notes in steps if _kinds(notes) == _kinds(steps[-1])]  # what learns may change its messages in between
    return tuple(
        Part(statistics.fmean(note.seconds for note in notes), notes[-1].message) for notes in zip(*alike, strict=True)
    )


def _kinds(notes: Sequence[Note]) -> list[str | None]:
    return [None if note.message is None else note.message.kind for note in notes]


def without_warmup(compressor: Compressor) -> Compressor:
    """Take the warm-up out: its steps are few, and send more than those that follow."""
    match compressor:
        case Feedback():
            return replace(compressor, warmup=0)
        case ByLayer(rules, default):
            return ByLayer(tuple((pattern, without_warmup(each)) for pattern, each in rules), without_warmup(default))
    return compressor


def _steps(
    spec: str,
    grads: Mapping[str, Tensor],
    world: World,
    bucket_mb: float,
    device: torch.device,
    effort: Effort,
    most: float,
    momentum: OwnMomentum | None,
    between: Callable[[], object],
    least: int = 2,
) -> list[tuple[tuple[str, ...], list[list[Note]]]]:
    """Return the notes of each bucket, step by step."""
    network = Mirror(world, device_wait(device), most, least)
    layers = {name: Layer(grad.numel(), device, grad.dim()) for name, grad in grads.items()}
    updates = {name: torch.empty_like(grad).view(-1) for name, grad in grads.items()}
    targets = lambda bucket: [updates[name] for name in bucket.layout.names]  # noqa: E731
    compressor, rates = without_warmup(make(spec)), lambda names: (RATE,) * len(names)
    reducer = Reducer(compressor, layers, network, bucket_mb, 0, targets=targets, rates=rates, momentum=momentum)
    bucket_of = {name: bucket.index for bucket in reducer.buckets for name in bucket.layout.names}
    counted: list[dict[int, list[Note]]] = []
    began = 0.0
    for step in range(10**6):
        if step == effort.settling:
            began = time.perf_counter()
        if step >= effort.settling + effort.counted and time.perf_counter() - began >= effort.seconds:
            break
        network.notes = {}
        between()
        for name in reversed(list(grads)):
            network.begin(bucket_of[name])
            reducer.mark_ready(name, grads[name])
        reducer.start_all()
        while reducer.advance():
            pass
        network.close()
        reducer.end_step()
        if step >= effort.settling:
            counted.append(network.notes)
    return [(bucket.layout.names, [notes[bucket.index] for notes in counted]) for bucket in reducer.buckets]
