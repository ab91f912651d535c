"""Predicts the step times of every way of exchanging gradients on a cluster that need not be there."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradcomp.core.requests import World
from gradcomp.prediction import baselines, measure, timeline, workload
from gradcomp.prediction.link import Link, bandwidth_of, seconds_of
from gradcomp.prediction.measure import Bucket
from gradcomp.prediction.profile import Profile, load
from gradcomp.prediction.result import Line, Prediction
from gradcomp.prediction.timeline import Work
from gradcomp.spec import make, names

# Why a compressor that learns is left out.
LEARNS = "it sends other messages once it has learned, which a few steps do not show; train with it for a while to time it"

# About so many computations are timed for a baseline.
COMPUTATIONS = 25

# More ranks than any cluster has: each takes some memory here.
MOST_RANKS = 65_536


class Cluster(NamedTuple):
    """Ranks, spread evenly over hosts, and the hosts' link."""

    ranks: int
    hosts: int
    link: Link

    @property
    def world(self) -> World:
        """Return the world of rank 0."""
        given: dict[str, Any] = {"ranks": self.ranks, "hosts": self.hosts}
        for name, number in given.items():
            if isinstance(number, bool) or not isinstance(number, Integral) or not 1 <= int(number) <= MOST_RANKS:
                raise ValueError(f"{name}={number!r} must be a whole number, at least 1 and at most {MOST_RANKS}")
        if self.ranks % self.hosts:
            raise ValueError(f"{self.ranks} ranks cannot be spread evenly over {self.hosts} hosts; give a divisor of the ranks")
        return World(0, self.ranks, tuple(rank // (self.ranks // self.hosts) for rank in range(self.ranks)))

    def __str__(self) -> str:
        return f"{self.ranks} ranks on {self.hosts} hosts, {self.link}"


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
    machine = None if profile is None else _machine(profile, device, loss)
    shapes, types = workload.shapes_of(model), workload.types_of(model)
    of_host = link if isinstance(link, Link) else Link(bandwidth_of(link, "link"), seconds_of(latency, "latency"))
    cluster = Cluster(ranks, ranks if hosts is None else hosts, of_host)
    work = _work_of(model, shapes, forward, backward, optimizer, loss)
    wanted, left_out = _wanted([specs] if isinstance(specs, str) else specs, shapes, machine)
    place = workload.device_named(device) if device is not None else workload.device_of({} if machine else model)
    world, lines = cluster.world, []
    for done, spec in enumerate(wanted):
        if tell is not None:
            tell(f"{spec}, {ranks} ranks", done / len(wanted))
        effort = measure.EFFORT if machine is None else measure.MESSAGES
        buckets = measured(spec, shapes, world, bucket_mb, place, types, effort)
        if machine is not None:
            buckets = machine.priced(spec, buckets, shapes, world)
        lines.append(_line(spec, work, buckets, cluster.link, world))
    where = f"kernels timed on this {processor(place)}" if machine is None else str(machine)
    total = sum(torch.Size(shape).numel() for shape in shapes.values())
    return Prediction(str(cluster), where, total, lines, left_out)


def measured(
    spec: str,
    shapes: Mapping[str, Sequence[int]],
    world: World,
    bucket_mb: float,
    device: torch.device,
    types: workload.Types | None = None,
    effort: measure.Effort | None = None,
) -> list[Bucket]:
    """Measure the buckets of a spec or a baseline on this machine."""
    effort = effort or measure.EFFORT
    if baselines.is_baseline(spec):
        return baselines.measure(spec, shapes, device, types, effort.seconds / COMPUTATIONS)
    return measure.measure(spec, shapes, world, bucket_mb, device, effort, types)


def can_predict(spec: str) -> bool:
    """Decide whether a few steps show all messages. Refuse an unknown spec."""
    return baselines.is_baseline(spec) or not make(spec).traits.learns


def processor(device: torch.device) -> str:
    """Name the processor."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def _machine(profile: str | Path, device: Any, loss: object) -> Profile:
    """Read the profile. Refuse arguments that speak of this machine."""
    if device is not None:
        raise ValueError("device says where kernels are timed here, and a profile has their times; give one of them")
    if loss is not None:
        raise ValueError("loss= measures steps of this machine; with profile=, pass forward= and backward= of the profile's")
    return load(profile)


def _wanted(specs: Sequence[str] | None, shapes: workload.Shapes, machine: Profile | None) -> tuple[list[str], dict[str, str]]:
    """Return the specs and baselines to predict, and those that are left out, with the reason."""
    wanted = [*baselines.NAMES, *names()] if specs is None else list(specs)
    left_out = {spec: LEARNS for spec in wanted if not can_predict(spec)}
    for spec in wanted:
        if machine is not None and spec not in left_out and (lacks := machine.missing(spec, shapes)):
            left_out[spec] = lacks
    always = [baselines.NONE, baselines.STOCK, *baselines.HALVES]
    return [spec for spec in dict.fromkeys([*always, *wanted]) if spec not in left_out], left_out


def _line(spec: str, work: Work, buckets: Sequence[Bucket], link: Link, world: World) -> Line:
    """Predict one way's step."""
    step, passes = timeline.step(work, buckets, link, world), baselines.accumulated(spec)
    sent = sum(part.message.bytes for bucket in buckets for part in bucket.parts if part.message is not None)
    more = (passes - 1) * (work.forward + work.backward)
    return Line(spec, (step.seconds + more) / passes, step.encoding / passes, step.waiting / passes, sent // passes)


def _work_of(
    model: nn.Module | Mapping[str, Sequence[int]],
    shapes: workload.Shapes,
    forward: float | None,
    backward: float | None,
    optimizer: torch.optim.Optimizer | float,
    loss: Callable[[], Tensor] | None,
) -> Work:
    """Return the computing of a step, given or measured."""
    seconds = None if isinstance(optimizer, torch.optim.Optimizer) else optimizer
    if loss is not None:
        if forward is not None or backward is not None or seconds:
            raise ValueError(
                "with loss=, all times are measured: leave forward= and backward= out, and pass the optimizer itself"
            )
        if not isinstance(model, nn.Module):
            raise TypeError("loss= trains the model for some steps; pass the model, not its shapes")
        return workload.measured(model, loss, optimizer if isinstance(optimizer, torch.optim.Optimizer) else None)
    if forward is None or backward is None:
        raise ValueError("pass forward= and backward= in seconds, or loss=, with which they are measured here")
    if seconds is None:
        raise ValueError("the step of optimizer= is measured with loss= only; with forward= and backward=, pass its seconds")
    workload.check_times(forward=forward, backward=backward, optimizer=seconds)
    return workload.given(shapes, forward, backward, seconds)
