"""Predicts the step times of every way of exchanging gradients on a cluster that need not be there."""

from __future__ import annotations

import itertools
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from gradcomp.aliases import either
from gradcomp.core.compressor import Compressor
from gradcomp.core.requests import World
from gradcomp.engine.plan import checked_shapes
from gradcomp.prediction import measure, shards
from gradcomp.prediction.link import Link, Work, bandwidth_of, seconds_of, step_of, step_over_shards
from gradcomp.prediction.recording_network import Bucket, RecordingNetwork
from gradcomp.spec import make, names

Shapes = dict[str, tuple[int, ...]]

# Why a compressor that learns is left out.
LEARNS = "it sends other messages once it has learned, which a few steps do not show; train with it for a while to time it"

# More ranks than any cluster has: each takes some memory here.
MOST_RANKS = 65_536

# A spec is advised if it is this much faster than plain DDP or bf16.
WORTH = 1.03

# Called with the work under way, and the share that is done.
Tell = Callable[[str, float], None]


@dataclass(frozen=True)
class Line:
    """The step of a spec or a baseline.

    Attributes:
        spec: The spec, or the baseline's name.
        seconds: The time of a batch.
        encoding: Seconds of compressing and decompressing.
        waiting: Seconds of waiting for messages with nothing else to do.
        bytes: Handed to the network by a rank.
    """

    spec: str
    seconds: float
    encoding: float
    waiting: float
    bytes: int


@dataclass(frozen=True)
class Prediction:
    """The lines of all specs and baselines, which print as a table.

    Attributes:
        cluster: The cluster, in words.
        measured: Where kernels were timed.
        parameters: Entries of the model.
        lines: A line for each spec and baseline; prediction["topk"] finds one.
        left_out: Specs without a line, with the reason.
        fsdp: True for FSDP2 over shards.
    """

    cluster: str
    measured: str
    parameters: int
    lines: Sequence[Line]
    left_out: dict[str, str]
    fsdp: bool = False

    def __getitem__(self, spec: str) -> Line:
        for line in self.lines:
            if line.spec == spec:
                return line
        if spec in self.left_out:
            raise KeyError(f"{spec!r} was left out: {self.left_out[spec]}")
        raise KeyError(f"{spec!r} was not predicted; known: {', '.join(line.spec for line in self.lines)}")

    @property
    def advice(self) -> str:
        """Say in a sentence what to use. Steps without communication, and those that train differently, are no candidates."""
        advices = shards.MIXED if self.fsdp else {name: f"use {name}" for name in measure.HALVES}
        stock, halves = self[measure.STOCK], [self[name] for name in advices]
        half = next(each for each in halves if each.seconds <= WORTH * min(line.seconds for line in halves))
        halved = stock.seconds / half.seconds
        # Where gradients have 16 bits already, a hook to 16 bits saves nothing, and differs by noise.
        takes_half = half.bytes < stock.bytes and halved > WORTH
        simple, how = (half, advices[half.spec]) if takes_half else (stock, "stay dense")
        others = [each for each in self.lines if each.spec not in advices and measure.EVERY not in each.spec]
        own = [each for each in others if not measure.is_baseline(each.spec)]
        if not own:
            which = "" if takes_half else f"{half.spec} is "
            return f"{how}: {which}{halved:.2f} x as fast as uncompressed. No spec for every step was predicted."
        best = min(own, key=lambda line: line.seconds)
        gain = simple.seconds / best.seconds
        if gain <= WORTH:
            return f"{how}: the fastest spec, {best.spec}, would be {gain:.2f} x as fast."
        return (
            f"{best.spec}: {stock.seconds / best.seconds:.2f} x as fast as uncompressed, {half.seconds / best.seconds:.2f} x "
            f"as {half.spec}, and {best.seconds / self[measure.NONE].seconds:.2f} x the time of no communication."
        )

    def json(self) -> dict[str, Any]:
        """Return everything as plain numbers and texts."""
        return {**asdict(self), "advice": self.advice}

    def __str__(self) -> str:
        width = max(len(line.spec) for line in self.lines)
        row = "{:{}}  {:>9}  {:>6}  {:>14}  {:>10}  {:>10}  {:>13}  {:>11}".format
        heads = ("ms per step", "x none", "speedup", "kernels ms", "waiting ms", "bytes", "compression")
        rows, dense = [row("", width, *heads)], self[measure.STOCK].bytes if self.fsdp else 4 * self.parameters
        for line in sorted(self.lines, key=lambda line: line.seconds):
            total, encoding, waiting = (f"{1e3 * each:.1f}" for each in (line.seconds, line.encoding, line.waiting))
            times, speed = line.seconds / self[measure.NONE].seconds, self[measure.STOCK].seconds / line.seconds
            compression = f"{dense / line.bytes:.1f} x" if line.bytes else "-"
            cells = (total, f"{times:.2f}", f"{speed:.2f}", encoding, waiting, f"{line.bytes:,}", compression)
            rows.append(row(line.spec, width, *cells))
        reasons = {why: [spec for spec, other in self.left_out.items() if other == why] for why in self.left_out.values()}
        out = [f"left out: {', '.join(specs)}: {why}" for why, specs in reasons.items()]
        about = f"{self.cluster}; {self.parameters:,} parameters; {self.measured}"
        return "\n".join((self.advice, "", about, "", *rows, *out))


def predict(
    model: nn.Module | Mapping[str, Sequence[int]],
    ranks: int,
    *,
    hosts: int | None = None,
    link: str | Link = "10Gbit/s",
    latency: str = "50us",
    forward_time: float,
    backward_time: float,
    optimizer_time: float = 0.0,
    specs: Sequence[str | Compressor] | None = None,
    fsdp: bool = False,
    bucket_mb: float | None = None,
    bucket_cap_mb: float | None = None,
    device: str | torch.device | None = None,
    tell: Tell | None = None,
) -> Prediction:
    """Predict step times without an exchange, by plain DDP, bf16, fp16, accumulation and every compressor; or by FSDP2.

    Args:
        model: The model, or {name: shape}.
        ranks: The ranks of the cluster.
        hosts: The hosts of the cluster; one for each rank by default.
        link: The bandwidth between hosts; or a Link, of gradcomp.prediction.link.
        latency: The latency of a message between hosts.
        forward_time: Seconds of a forward pass.
        backward_time: Seconds of a backward pass.
        optimizer_time: Seconds of the optimizer's step.
        specs: Those to predict; every compressor's default if none. Steps are those after a warm-up (warmup=N). A spec that
            learns (lgc) is left out, and the prediction says so. "sign every=30" predicts local steps, on average. Under
            FSDP2, "blocks weights=bf16" sends the weights in bfloat16, "blocks weights=blocks:bits=8" rounded, and "blocks"
            as they are; specs without effect there are left out.
        fsdp: Predict FSDP2 over shards on all ranks. Each part of a list of modules, such as blocks.0, is sharded by itself.
        bucket_mb: The largest size of a bucket, or bucket_cap_mb. See gradcomp.ddp.attach().
        device: Where kernels are timed, and where gradients will lie; the model's, or the CPU, by default.
        tell: Called with the work under way, and the share that is done.

    Returns:
        The step times, which print as a table with a recommendation.

    Raises:
        ValueError: An argument is wrong, or two contradict each other.
    """
    shapes = shapes_of(model)
    weights = dict(model.named_parameters()) if isinstance(model, nn.Module) else {}
    types = {name: each.dtype for name, each in weights.items()}
    layers = {name: (tuple(each.shape), name in shapes, each.dtype) for name, each in weights.items()}
    layers = layers or {name: (tuple(shape), True, torch.float32) for name, shape in shapes.items()}
    link = link if isinstance(link, Link) else Link(bandwidth_of(link, "link"), seconds_of(latency, "latency"))
    hosts = ranks if hosts is None else hosts
    bucket_mb = either(None, bucket_mb=bucket_mb, bucket_cap_mb=bucket_cap_mb)
    world, work = _world(ranks, hosts), _work(shapes, forward_time, backward_time, optimizer_time)
    every = shards.every_way() if fsdp else [*measure.BASELINES, *names()]
    given = every if specs is None else [specs] if isinstance(specs, str | Compressor) else specs
    asked = [str(each) if isinstance(each, Compressor) else each for each in given]
    if other := [spec for spec in asked if not isinstance(spec, str)]:
        raise ValueError(f"specs has {other[0]!r}; write each spec as a text, such as 'topk:ratio=0.01'")
    if fsdp and bucket_mb is not None:
        raise ValueError("bucket_mb= is for DDP, and FSDP2 reduces module by module: leave out bucket_mb=, or fsdp=True")
    reasons = {spec: shards.why_not(spec) if fsdp else _why_not(spec) for spec in asked}
    left_out = {spec: why for spec, why in reasons.items() if why is not None}
    place = device_for(model, device)
    always = (measure.NONE, measure.STOCK, *(shards.MIXED if fsdp else measure.HALVES))
    wanted = [spec for spec in dict.fromkeys((*always, *asked)) if spec not in left_out]
    lines = []
    for done, spec in enumerate(wanted):
        if tell is not None:
            tell(f"{spec}, {ranks} ranks", done / len(wanted))
        if fsdp:
            modules = shards.measure_shards(spec, layers, RecordingNetwork(world, place))
            step = step_over_shards(work, modules, link, world, overlaps=place.type == "cuda")
            lines.append(Line(spec, *step, sum(each.sent(world) for each in modules)))
            continue
        exchanged, _ = measure.local_steps(spec)
        buckets = measure.measure(exchanged, shapes, world, bucket_mb, place, types, measure.SECONDS)
        lines.append(_line(spec, work, buckets, link, world))
    where = f"kernels timed on this {_processor(place)}"
    total = sum(torch.Size(shape).numel() for shape in shapes.values())
    door = "" if not fsdp else ", FSDP2" if place.type == "cuda" else ", FSDP2 on CPUs, where nothing overlaps"
    return Prediction(f"{ranks} ranks on {hosts} hosts, {link}{door}", where, total, lines, left_out, fsdp)


def shapes_of(model: nn.Module | Mapping[str, Sequence[int]]) -> Shapes:
    """Return the shapes of the parameters that are trained."""
    if isinstance(model, nn.Module):
        found = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    else:
        found = checked_shapes(model, "the model, which can be a torch.nn.Module,")
    if not any(torch.Size(shape).numel() for shape in found.values()):
        raise ValueError("the model has no parameter to train; pass the model, or {name: shape}")
    return found


def device_for(model: object, device: str | torch.device | None = None) -> torch.device:
    """Return the device that is named; or the model's, which is the CPU for shapes, and for a model without memory."""
    if device is None:
        first = next(model.parameters(), None) if isinstance(model, nn.Module) else None
        return torch.device("cpu") if first is None or first.is_meta else first.device
    try:
        found = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError):  # AssertionError: torch without CUDA
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise ValueError(f"device {str(device)!r} is not here or has no kernels of gradcomp; write cpu, cuda or cuda:0")
    return found


def _why_not(spec: str) -> str | None:
    """Return why a spec is not predicted under DDP; None: it is."""
    exchanged, _ = measure.local_steps(spec)
    return LEARNS if not measure.is_baseline(exchanged) and make(exchanged).traits.learns else None


def _work(shapes: Shapes, forward: float, backward: float, optimizer: float) -> Work:
    """Return the computing of a step, in which backward takes as long for each layer as the layer is large."""
    for name, each in (("forward_time", forward), ("backward_time", backward), ("optimizer_time", optimizer)):
        if not (isinstance(each, (int, float)) and 0 <= each < math.inf):
            raise ValueError(f"{name}={each!r} must be a time in seconds")
    if not (forward or backward or optimizer):
        raise ValueError(
            "forward_time=0 and backward_time=0: with nothing to compute there is nothing to compare with; give a microsecond"
        )
    behind = list(itertools.accumulate(math.prod(shape) for shape in reversed(shapes.values())))
    ready = {name: part / behind[-1] for name, part in zip(reversed(shapes), behind, strict=True)}
    return Work(forward, backward, ready, optimizer)


def _processor(device: torch.device) -> str:
    """Name the processor."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def _world(ranks: int, hosts: int) -> World:
    """Return the world of rank 0, with the ranks spread evenly over the hosts."""
    for name, number in (("ranks", ranks), ("hosts", hosts)):
        if isinstance(number, bool) or not hasattr(number, "__index__") or not 1 <= number <= MOST_RANKS:
            raise ValueError(f"{name}={number!r} must be a whole number, at least 1 and at most {MOST_RANKS}")
    if ranks % hosts:
        raise ValueError(f"{ranks} ranks cannot be spread evenly over {hosts} hosts; give a divisor of the ranks")
    return World(0, ranks, tuple(rank // (ranks // hosts) for rank in range(ranks)))


def _line(spec: str, work: Work, buckets: Sequence[Bucket], link: Link, world: World) -> Line:
    """Predict one way's step; of several passes, or local steps, that share an exchange, the mean."""
    (_, every), passes = measure.local_steps(spec), max(1, measure.accumulated(spec))
    if every:  # what travels is known after the last step
        step = step_of(Work(0.0, 0.0, dict.fromkeys(work.ready, 1.0)), buckets, link, world)
        count, more = every, every * (work.forward + work.backward + work.optimizer)
    else:
        step = step_of(work, buckets, link, world)
        count, more = passes, (passes - 1) * (work.forward + work.backward)
    sent = sum(part.message.bytes for bucket in buckets for part in bucket.parts if part.message is not None)
    return Line(spec, (step.seconds + more) / count, step.encoding / count, step.waiting / count, sent // count)
