"""Measures a spec or a baseline here: one rank's steps with random gradients on a recording network, bucket by bucket."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gradcomp.core.by_layer import ByLayer
from gradcomp.core.compressor import Compressor
from gradcomp.core.requests import Reduce, World
from gradcomp.engine.feedback import Feedback
from gradcomp.engine.reducer import Options, Reducer
from gradcomp.engine.slots import Slot
from gradcomp.engine.updates.hidden_momentum import Momentum
from gradcomp.engine.updates.progress import StepRule
from gradcomp.prediction.recording_network import Bucket, Part, RecordingNetwork
from gradcomp.spec import make

# Steps before those that count, since capacities follow counts some steps later; steps that count; and seconds for more.
SETTLING, COUNTED, SECONDS = 12, 3, 0.5

# The learning rate of all layers, and the optimizer's momentum.
RATE, MOMENTUM = 0.1, Momentum(0.9)

# Of a large world, a gather's reply holds as many payloads as fit these bytes; the rest of the time follows from two sizes.
HELD = 32e6

# DistributedDataParallel's buckets in bytes: the first one that backward fills, and the others.
FIRST, OTHERS = 2**20, 25 * 2**20

# The baselines without gradcomp: no exchange, DDP's own reduction, its hooks to half precision, and accumulation.
NONE, STOCK, HALVES = "none", "stock", {"bf16": torch.bfloat16, "fp16": torch.float16}
BASELINES = (STOCK, *HALVES, "accumulate:steps=4")

# Between a spec and the local steps after which it exchanges weight changes.
EVERY = " every="

# Does a step, and fills the network's parts.
DoStep = Callable[[], None]


def accumulated(spec: str) -> int:
    """Return the backward passes of a step that accumulates; 0 for other specs. Refuse a wrong number."""
    if not spec.startswith("accumulate"):
        return 0
    match = re.fullmatch(r"accumulate:steps=([1-9][0-9]*)", spec)
    if match is None:
        raise ValueError(f"{spec!r} is not a way to exchange gradients; write for example {BASELINES[-1]}")
    return int(match[1])


def is_baseline(spec: str) -> bool:
    """Decide whether a spec is a baseline. Refuse an accumulation with a wrong number."""
    return spec in (NONE, STOCK, *HALVES) or accumulated(spec) > 0


def local_steps(spec: str) -> tuple[str, int]:
    """Divide "sign every=30" into the spec and the local steps; 0 for other specs. Refuse a wrong number."""
    exchanged, is_local, every = spec.partition(EVERY)
    if is_local and (not re.fullmatch("[1-9][0-9]*", every) or is_baseline(exchanged)):
        raise ValueError(f"{spec!r} is not an exchange of local steps; write for example 'sign every=30'")
    return exchanged, int(every) if is_local else 0


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
    bucket_mb: float | None,
    device: torch.device,
    types: Mapping[str, torch.dtype] | None = None,
    seconds: float = 0.0,
) -> list[Bucket]:
    """Let a rank do some steps, as after a warm-up. Return its buckets, in the order in which backward fills them.

    types: of gradients by layer, float32 by default. seconds: of the steps that count, at least.
    """
    grads = gradients(shapes, device, types)
    every = _steps(spec, grads, RecordingNetwork(world, device, HELD), bucket_mb, seconds)
    if all(part.payloads in (0, world.size) for bucket in every for part in bucket.parts):
        return every
    fewer = _steps(spec, grads, RecordingNetwork(world, device, HELD / 4, least=1), bucket_mb, seconds)
    return [
        long._replace(parts=tuple(_extended(*each, world.size) for each in zip(long.parts, short.parts, strict=True)))
        for long, short in zip(every, fewer, strict=True)
    ]


def without_warmup(compressor: Compressor) -> Compressor:
    """Take the warm-up out: its steps are few, and send more than those that follow."""
    match compressor:
        case Feedback():
            return replace(compressor, warmup=0)
        case ByLayer(rules, default):
            return ByLayer(tuple((pattern, without_warmup(each)) for pattern, each in rules), without_warmup(default))
    return compressor


def _steps(
    spec: str, grads: Mapping[str, Tensor], network: RecordingNetwork, bucket_mb: float | None, seconds: float
) -> list[Bucket]:
    """Do steps on a network."""
    on_updates = not is_baseline(spec) and make(spec).traits.acts_on_updates
    if is_baseline(spec):
        plan, do_step = _baseline(spec, grads, network)
    else:
        plan, do_step = (_of_updates if on_updates else _of_gradients)(spec, grads, network, bucket_mb)
    found = repeated(network, do_step, seconds)
    return [Bucket(names, found[i], on_updates) for i, names in enumerate(plan)]


def repeated(network: RecordingNetwork, do_step: DoStep, seconds: float) -> dict[int, tuple[Part, ...]]:
    """Do steps on a network. Return the parts of each bucket. seconds: of the steps that count, at least."""
    counted: list[dict[int, list[Part]]] = []
    began, step = 0.0, 0
    while len(counted) < COUNTED or time.perf_counter() - began < seconds:
        if step == SETTLING:
            began = time.perf_counter()
        network.parts = {}
        do_step()
        if step >= SETTLING:
            counted.append(network.parts)
        step += 1
    return {i: _means([parts[i] for parts in counted]) for i in counted[-1]}


def _of_gradients(
    spec: str, grads: Mapping[str, Tensor], network: RecordingNetwork, bucket_mb: float | None
) -> tuple[list[tuple[str, ...]], DoStep]:
    """Make a reducer. Return the layers of each bucket, and a function that does a step."""
    slots = {name: Slot(name, grad.shape, grad.device) for name, grad in grads.items()}
    for name, slot in slots.items():
        slot.update = torch.empty_like(grads[name]).view(-1)
    reducer = Reducer(without_warmup(make(spec)), slots, network, Options(bucket_mb=bucket_mb))
    reducer.context.layer_rates = dict.fromkeys(slots, RATE)
    bucket_of = {name: bucket.index for bucket in reducer.buckets for name in bucket.layout.names}

    def do_step() -> None:
        for name in reversed(list(grads)):
            network.begin(bucket_of[name])
            reducer.ready(slots[name], grads[name])
        reducer.start_all()
        while reducer.advance():
            pass
        network.close()
        reducer.end_step()

    return [bucket.layout.names for bucket in reducer.buckets], do_step


def _of_updates(
    spec: str, grads: Mapping[str, Tensor], network: RecordingNetwork, bucket_mb: float | None
) -> tuple[list[tuple[str, ...]], DoStep]:
    """Make a reducer that exchanges updates of an optimizer with momentum. See _of_gradients().

    Updates go straight into the residuals, since the optimizer's time is none of the exchange's.
    """
    weights = {name: torch.nn.Parameter(torch.zeros_like(grad)) for name, grad in grads.items()}
    slots = {name: Slot(name, grad.shape, grad.device, weights[name]) for name, grad in grads.items()}
    reducer = Reducer(without_warmup(make(spec)), slots, network, Options(bucket_mb=bucket_mb), on_updates=True)
    reducer.context.layer_rates = dict.fromkeys(slots, RATE)
    updates = [torch.cat([RATE * grads[name].view(-1).float() for name in each.layout.names]) for each in reducer.buckets]

    def do_step() -> None:
        for bucket, update in zip(reducer.buckets, updates, strict=True):
            assert bucket.progress is not None
            bucket.progress.rule = StepRule(MOMENTUM)
            bucket.progress.residual.add_(update)
            network.begin(bucket.index)
            bucket.progress.begin()
            reducer.run([bucket])
            network.close()

    return [bucket.layout.names for bucket in reducer.buckets], do_step


def _baseline(spec: str, grads: Mapping[str, Tensor], network: RecordingNetwork) -> tuple[list[tuple[str, ...]], DoStep]:
    """Return the layers of each bucket of DistributedDataParallel, and a function that computes a step as its hooks do."""
    plan = [] if spec == NONE else _ddp_buckets(grads)
    flats = [torch.cat([grads[name].view(-1) for name in names]) for names in plan]
    layers = [
        list(zip(flat.split([grads[name].numel() for name in names]), (grads[name].view(-1) for name in names), strict=True))
        for flat, names in zip(flats, plan, strict=True)
    ]

    def do_step() -> None:
        for i, flat in enumerate(flats):
            network.begin(i)
            for view, grad in layers[i]:
                view.copy_(grad)
            sent = flat.to(HALVES.get(spec, flat.dtype))
            network.start(Reduce(sent, 1 / network.world.size), spec)()
            if sent is not flat:
                flat.copy_(sent)
            for view, grad in layers[i]:
                grad.copy_(view)
            network.close()

    return plan, do_step


def _ddp_buckets(grads: Mapping[str, Tensor]) -> list[tuple[str, ...]]:
    """Group layers as DistributedDataParallel does, from the last one on. A bucket's gradients have one type."""
    closed: list[list[str]] = []
    open_: dict[torch.dtype, list[str]] = {}
    limits: dict[torch.dtype, int] = {}
    for name in reversed(list(grads)):
        form = grads[name].dtype
        names = open_.setdefault(form, [])
        names.append(name)
        if sum(grads[each].nbytes for each in names) >= limits.get(form, FIRST):
            closed.append(open_.pop(form))
            limits[form] = OTHERS
    return [tuple(names) for names in (*closed, *open_.values())]


def _means(steps: Sequence[Sequence[Part]]) -> tuple[Part, ...]:
    """Take the mean of every part's seconds, and its message in the last step.

    The mean: where ranks share cores, only some runs of a short kernel wait for one, and a median knows nothing of them.
    """
    return tuple(
        parts[-1]._replace(seconds=statistics.fmean(part.seconds for part in parts)) for parts in zip(*steps, strict=True)
    )


def _extended(long: Part, short: Part, ranks: int) -> Part:
    """Extend a part's time to the payloads of all ranks."""
    if long.payloads in (0, ranks) or long.payloads == short.payloads:
        return long
    each = max(0.0, (long.seconds - short.seconds) / (long.payloads - short.payloads))
    return long._replace(seconds=long.seconds + each * (ranks - long.payloads))
