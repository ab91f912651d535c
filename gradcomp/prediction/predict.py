"""Predicts the step times of every way of exchanging gradients on a cluster that need not be there."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from gradcomp.core.requests import World
from gradcomp.prediction import measure, workload
from gradcomp.prediction.link import Link, Work, bandwidth_of, seconds_of, step_of
from gradcomp.prediction.profile import load
from gradcomp.prediction.recording_network import Bucket
from gradcomp.prediction.result import Line, Prediction
from gradcomp.spec import make, names

# Why a compressor that learns is left out.
LEARNS = "it sends other messages once it has learned, which a few steps do not show; train with it for a while to time it"

# More ranks than any cluster has: each takes some memory here.
MOST_RANKS = 65_536

# Called with the work under way, and the share that is done.
Tell = Callable[[str, float], None]


def predict(
    model: nn.Module | Mapping[str, Sequence[int]],
    ranks: int,
    *,
    hosts: int | None = None,
    link: str | Link = "10Gbit/s",
    latency: str = "50us",
    forward: float | None = None,
    backward: float | None = None,
    optimizer: torch.optim.Optimizer | float = 0.0,
    loss: Callable[[], Tensor] | None = None,
    specs: Sequence[str] | None = None,
    bucket_mb: float = 25,
    device: str | torch.device | None = None,
    profile: str | Path | None = None,
    tell: Tell | None = None,
) -> Prediction:
    """Predict step times: of none, stock DDP, bf16, fp16, accumulation, and every compressor.

    Args:
        model: The model, or {name: shape}.
        ranks: The ranks of the cluster.
        hosts: The hosts of the cluster; one for each rank by default.
        link: The bandwidth between hosts; or a Link, of gradcomp.prediction.link.
        latency: The latency of a message between hosts.
        forward: Seconds of a forward pass.
        backward: Seconds of a backward pass.
        optimizer: Seconds of the optimizer's step; or the optimizer, beside loss.
        loss: Computes the loss of a batch, in place of forward and backward: the model is trained for some steps here.
        specs: Those to predict; every compressor's default if none. Steps are those after a warm-up (warmup=N). A spec that
            learns (lgc) is left out, and the prediction says so.
        bucket_mb: The largest size of a bucket of several layers, in 10^6 bytes.
        device: Where kernels are timed, and where gradients will lie; the model's, or the CPU, by default.
        profile: A machine to predict for in place of this one: a file of `python -m gradcomp profile`, or h100, whose kernels
            were timed on an H100.
        tell: Called with the work under way, and the share that is done.

    Returns:
        The step times, which print as a table with an advice.

    Raises:
        ValueError: An argument is wrong, or two contradict each other.
    """
    if profile is not None and device is not None:
        raise ValueError("device says where kernels are timed here, and a profile has their times; give one of them")
    if profile is not None and loss is not None:
        raise ValueError("loss= measures steps of this machine; with profile=, pass forward= and backward= of the profile's")
    machine = None if profile is None else load(profile)
    shapes = workload.shapes_of(model)
    types = {name: p.dtype for name, p in model.named_parameters()} if isinstance(model, nn.Module) else None
    link = link if isinstance(link, Link) else Link(bandwidth_of(link, "link"), seconds_of(latency, "latency"))
    hosts = ranks if hosts is None else hosts
    world, work = _world(ranks, hosts), workload.work_of(model, shapes, forward, backward, optimizer, loss)
    asked = [*measure.BASELINES, *names()] if specs is None else [specs] if isinstance(specs, str) else specs
    left_out = {spec: LEARNS for spec in asked if learns(spec)}
    if machine is not None:
        only = f"the profile of {machine.machine} has only times of {', '.join(machine.costs)}"
        left_out = {spec: only for spec in asked if spec not in left_out and machine.lacks(spec, shapes)} | left_out
    place = workload.device_for(model, device if machine is None else "cpu")
    always = (measure.NONE, measure.STOCK, *measure.HALVES)
    wanted = [spec for spec in dict.fromkeys((*always, *asked)) if spec not in left_out]
    lines = []
    for done, spec in enumerate(wanted):
        if tell is not None:
            tell(f"{spec}, {ranks} ranks", done / len(wanted))
        seconds = measure.SECONDS if machine is None else 0.0
        buckets = measure.measure(spec, shapes, world, bucket_mb, place, types, seconds)
        if machine is not None:
            buckets = machine.priced(spec, buckets, shapes, world)
        lines.append(_line(spec, work, buckets, link, world))
    where = f"kernels timed on this {processor(place)}" if machine is None else str(machine)
    total = sum(torch.Size(shape).numel() for shape in shapes.values())
    return Prediction(f"{ranks} ranks on {hosts} hosts, {link}", where, total, lines, left_out)


def learns(spec: str) -> bool:
    """Decide whether a few steps do not show all messages. Refuse an unknown spec."""
    return not measure.is_baseline(spec) and make(spec).traits.learns


def processor(device: torch.device) -> str:
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
    """Predict one way's step."""
    step, passes = step_of(work, buckets, link, world), max(1, measure.accumulated(spec))
    sent = sum(part.message.bytes for bucket in buckets for part in bucket.parts if part.message is not None)
    more = (passes - 1) * (work.forward + work.backward)
    return Line(spec, (step.seconds + more) / passes, step.encoding / passes, step.waiting / passes, sent // passes)
