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
from gradcomp.prediction import peers, timeline, trial, workload
from gradcomp.prediction.link import Times, times_of
from gradcomp.prediction.profile import Profile, load
from gradcomp.prediction.result import Line, Prediction
from gradcomp.prediction.timeline import Work
from gradcomp.prediction.trial import Bucket, Effort, try_out
from gradcomp.spec import make, names

# Why a compressor that learns is left out.
LEARNS = "it sends other messages once it has learned, which a few steps do not show; train with it for a while to time it"

# Enough to see messages, where a profile has the seconds.
MESSAGES = Effort(counted=1, seconds=0.0)

# About so many computations are timed for a peer.
COMPUTATIONS = 25

# More ranks than any cluster has: each takes some memory here.
MOST_RANKS = 65_536


class Cluster(NamedTuple):
    """Ranks, spread evenly over hosts, and the time of messages. hosts: one for each rank if None."""

    ranks: int
    hosts: int | None
    times: Times

    @property
    def world(self) -> World:
        """Return the world of rank 0."""
        hosts = self.ranks if self.hosts is None else self.hosts
        given: dict[str, Any] = {"ranks": self.ranks, "hosts": hosts}
        for name, number in given.items():
            if isinstance(number, bool) or not isinstance(number, Integral) or not 1 <= int(number) <= MOST_RANKS:
                raise ValueError(f"{name}={number!r} must be a whole number, at least 1 and at most {MOST_RANKS}")
        if self.ranks % hosts:
            raise ValueError(f"{self.ranks} ranks cannot be spread evenly over {hosts} hosts; give a divisor of the ranks")
        return World(0, self.ranks, tuple(rank // (self.ranks // hosts) for rank in range(self.ranks)))

    def __str__(self) -> str:
        return f"{self.ranks} ranks on {self.ranks if self.hosts is None else self.hosts} hosts, {self.times}"


# What is being done, and how much is done.
Tell = Callable[[str, float], None]


def predict(
    model: nn.Module | Mapping[str, Sequence[int]],
    ranks: int,
    *,
    hosts: int | None = None,
    link: str | Times = "10Gbit/s",
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
    """Predict step times: of none, stock DDP, bf16, fp16, PowerSGD, accumulation, and every compressor.

    model: the model, or {name: shape}. ranks, hosts: of the cluster; one rank on each host by default.
    link: the bandwidth between hosts; or a Link or Measured, of gradcomp.prediction.link. latency: of a message between hosts.
    forward, backward: seconds. optimizer: seconds of its step. loss: in their place, computes the loss of a batch; the model is
    then trained for some steps here, with optimizer if it is one.
    specs: those to predict; every compressor's default if none. Steps are those after a warm-up (warmup=N). A spec that learns
    (lgc) is left out, and the prediction says so.
    device: where kernels are timed, and where gradients will lie; the model's, or the CPU, by default.
    profile: a machine to predict for in place of this one: a file of `python -m gradcomp profile`, or h100, whose
    kernels were timed on an H100.
    tell: called with what is being done and how much is done.
    """
    machine, shapes = machine_of(profile, device, loss), workload.shapes_of(model)
    cluster, work = Cluster(ranks, hosts, times_of(link, latency)), work_of(model, shapes, forward, backward, optimizer, loss)
    wanted, left_out = wanted_of([specs] if isinstance(specs, str) else specs, shapes, machine)
    place = workload.device_named(device) if device is not None else workload.device_of({} if machine else model)
    tried = try_all(wanted, shapes, cluster.world, bucket_mb, place, tell, workload.types_of(model), machine)
    return prediction_of(shapes, lines_of(tried, work, cluster), left_out, cluster, place, machine)


def prediction_of(
    shapes: workload.Shapes,
    lines: list[Line],
    left_out: dict[str, str],
    cluster: Cluster,
    device: torch.device,
    machine: Profile | None,
) -> Prediction:
    """Put a prediction together."""
    total = sum(torch.Size(shape).numel() for shape in shapes.values())
    where = f"kernels timed on this {processor(device)}" if machine is None else str(machine)
    return Prediction(str(cluster), where, machine is not None and machine.predicted, total, lines, left_out)


def machine_of(
    profile: str | Path | None, device: str | torch.device | None = None, loss: Callable[[], Tensor] | None = None
) -> Profile | None:
    """Read the profile, if one is given. device, loss: speak of this machine, and cannot be given with it."""
    if profile is None:
        return None
    if device is not None:
        raise ValueError("device says where kernels are timed here, and a profile has their times; give one of them")
    if loss is not None:
        raise ValueError("loss= measures steps of this machine; with profile=, pass forward= and backward= of the profile's")
    return load(profile)


def wanted_of(
    specs: Sequence[str] | None, shapes: workload.Shapes, machine: Profile | None
) -> tuple[list[str], dict[str, str]]:
    """Return the ways to try, and those that are left out, with the reason."""
    wanted = [*peers.NAMES, *names()] if specs is None else list(specs)
    for spec in wanted:
        peers.check(spec)
    left_out = {spec: LEARNS for spec in wanted if not peers.is_peer(spec) and make(spec).traits.learns}
    for spec in wanted:
        if machine is not None and spec not in left_out and (lacks := machine.missing(spec, shapes)):
            left_out[spec] = lacks
    return [spec for spec in dict.fromkeys([peers.NONE, peers.STOCK, *peers.HALVES, *wanted]) if spec not in left_out], left_out


def try_all(
    wanted: Sequence[str],
    shapes: workload.Shapes,
    world: World,
    bucket_mb: float,
    device: torch.device,
    tell: Tell | None,
    types: workload.Types | None = None,
    machine: Profile | None = None,
) -> dict[str, list[Bucket]]:
    """Try every way here. machine: has the seconds of another machine."""
    found = {}
    for done, spec in enumerate(wanted):
        if tell is not None:
            tell(f"{spec}, {world.size} ranks", done / len(wanted))
        if machine is None:
            found[spec] = buckets_of(spec, shapes, world, bucket_mb, device, types)
        else:
            tried = buckets_of(spec, shapes, world, bucket_mb, device, types, MESSAGES)
            found[spec] = machine.priced(spec, tried, shapes, world)
    return found


def lines_of(tried: Mapping[str, Sequence[Bucket]], work: Work, cluster: Cluster) -> list[Line]:
    """Predict the step of every way that was tried."""
    return [line_of(spec, work, buckets, cluster.times, cluster.world) for spec, buckets in tried.items()]


def buckets_of(
    spec: str,
    shapes: workload.Shapes,
    world: World,
    bucket_mb: float,
    device: torch.device,
    types: workload.Types | None = None,
    effort: Effort | None = None,
) -> list[Bucket]:
    """Return the buckets of a spec or a peer, tried out on this machine."""
    if peers.is_peer(spec):
        return peers.buckets_of(spec, shapes, device, types, seconds=(effort or trial.EFFORT).seconds / COMPUTATIONS)
    return try_out(spec, shapes, world, bucket_mb, device, effort, types)


def line_of(spec: str, work: Work, buckets: Sequence[Bucket], link: Times, world: World) -> Line:
    """Predict one way's step."""
    step, passes = timeline.step(work, buckets, link, world), peers.accumulated(spec)
    sent = sum(part.message.bytes for bucket in buckets for part in bucket.parts if part.message is not None)
    more = (passes - 1) * (work.forward + work.backward)
    return Line(spec, (step.seconds + more) / passes, step.encoding / passes, step.waiting / passes, sent // passes)


def work_of(
    model: nn.Module | Mapping[str, Sequence[int]],
    shapes: workload.Shapes,
    forward: float | None,
    backward: float | None,
    optimizer: torch.optim.Optimizer | float,
    loss: Callable[[], Tensor] | None,
) -> Work:
    """Return what a step computes, given or measured."""
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


def processor(device: torch.device) -> str:
    """Name the processor."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
