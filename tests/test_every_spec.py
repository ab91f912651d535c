"""Every kind of spec on real ranks, by each door: training is the simulator's, to the last bit, also across a checkpoint.

The simulator gets the ranks' gradients, or the updates that each rank's own optimizer makes of them.
"""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import doors
import horovod.torch as hvd
import pytest
import ranks
import small_net
import torch
from doors import COMPRESSION, DDP, OWN, Training
from torch import Tensor

import gradcomp

pytestmark = pytest.mark.slow

# Steps of a training, and the step after which it is saved. Delayed counts act eight steps later, so within a training.
STEPS, SAVED = 12, 6
BUCKET_MB = 0.02
KNOBS = {
    "gs_sgd": "gs_sgd:ratio=0.02",
    "lgc": "lgc:dense=2,learn=3,ratio=0.02",
    "sdagc": "sdagc:lam=2",
    "sketched_sgd": "sketched_sgd:ratio=0.02",
    "topk": "topk:ratio=0.05",
}
# What a reduction adds: with more than two ranks, in an order of the network's own.
REDUCED = ["dense", "gs_sgd:ratio=0.02", "lgc:dense=2,learn=3,ratio=0.02,instance=server"]
GATHERED_OR_SENT = [
    "topk:ratio=0.02,momentum=0.75,route=split",
    "topk:ratio=0.02,route=tree",
    "gtopk:ratio=0.02,momentum=0.75,clip=1",
    "sketched_sgd:ratio=0.02",
    "orq:levels=5,route=alltoall",
    "blocks:bits=4,route=alltoall",
    "sign",
]
# Momenta are 3/4: the whole effect of a gradient is exactly four times its own.
SPECS = list(
    dict.fromkeys(
        [
            *(KNOBS.get(name, name) for name in gradcomp.names()),
            *REDUCED,
            *GATHERED_OR_SENT,
            "topk; *.bias=dense; last.*=sign",
            "blocks; *.bias=dense",
            "lgc:dense=2,learn=3,ratio=0.02,first=dense,momentum=0.75",
            "sdagc:density=0.02,small=pool,momentum=0.75",
            "sdagc:lam=2,sam=0.9,flush=5,clip=1,warmup=5",
            "sdagc:lam=2,wire=exact",
            "sdagc:lam=2,momentum=0.75,clip=1,clip_by=model",
            "sdagc:density=0.05,lr_revision=density",
            "sdagc; *.bias=dense; *last.*=topk:ratio=0.1",
            "sketched_sgd:ratio=0.02,candidates=1",
            "orq:sigmas=1.5,group=512,route=alltoall",
            "qsgd:levels=9,group=128,route=allgather",
        ]
    )
)
BY_HOST = [
    "topk:ratio=0.05,by_host=true",
    "topk:ratio=0.05,route=split,momentum=0.75,by_host=true",
    "sdagc:lam=2,small=none,by_host=true",
    "gs_sgd:ratio=0.02,by_host=true",
    "dense:by_host=true",
    "blocks:by_host=true",
    "bingrad:form=pb,group=512,by_host=true",
]
# Door, number of ranks and of hosts with equally many of them, and the specs. Horovod's two doors take turns.
STARTS = {
    (COMPRESSION, 2, 1): SPECS[::2],
    (OWN, 2, 1): SPECS[1::2],
    (DDP, 2, 1): SPECS,
    (DDP, 3, 1): REDUCED + GATHERED_OR_SENT,
    (OWN, 4, 2): BY_HOST,
}
every_case = pytest.mark.parametrize(
    "start, spec", [(start, spec) for start, specs in STARTS.items() for spec in specs], ids=str
)
every_start = pytest.mark.parametrize("start", STARTS, ids=str)
Start = tuple[str, int, int]


class Run(Training):
    """A model in training with a learning rate that falls. Each rank leaves a layer out now and then."""

    def __init__(self, door: str, spec: str, seed: int = 1):
        ddp = {"find_unused_parameters": True} if door == DDP else {}
        super().__init__(door, small_net.net(seed), spec, prefix="", bucket_mb=BUCKET_MB, **ddp)

    def take(self, steps: range) -> Tensor:
        return stepped(self.optimizer, steps, lambda step: self.backward(skip=skips(doors.rank(self.door), step)), self.model)

    def saved(self) -> io.BytesIO:
        file = io.BytesIO()
        torch.save((self.model.state_dict(), self.handle.state_dict()), file)
        file.seek(0)
        return file

    def load(self, file: io.BytesIO) -> None:
        for part, state in zip((self.model, self.handle), torch.load(file), strict=True):
            part.load_state_dict(state)


def skips(rank: int, step: int) -> bool:
    return (step + rank) % 5 == 0


def stepped(optimizer: Any, steps: range, gradients: Callable[[int], None], net: torch.nn.Module) -> Tensor:
    for step in steps:
        optimizer.param_groups[0]["lr"] = 0.02 / (1 + step // 3)
        optimizer.zero_grad()
        gradients(step)
        optimizer.step()
    return small_net.weights(net)


def watch() -> None:
    """Let each of Horovod's operations have a name, and entries to send and to receive."""
    started, synchronize = [], hvd.synchronize

    def watched(operation: Any) -> Any:
        def start(tensor: Tensor, **options: Any) -> Any:
            assert tensor.numel() > 0 and options["name"], f"{operation.__name__} of {tensor.numel()} entries"
            started.append(operation(tensor, **options))
            return started[-1]

        return start

    def waited_for(handle: Any) -> Any:
        answer = synchronize(handle)
        assert (answer[0] if isinstance(answer, tuple) else answer).numel() > 0 or handle not in started
        return answer

    hvd.synchronize = waited_for
    for name in ("alltoall_async", "allgather_async", "allreduce_async_"):
        setattr(hvd, name, watched(getattr(hvd, name)))


def trained(door: str, spec: str) -> dict[str, Any]:
    """Train to the end; and with new objects from the middle, out of a file."""
    run = Run(door, spec)
    run.take(range(SAVED))
    file = run.saved()
    run.data, ahead = itertools.tee(run.data)
    found = {"weights": run.take(range(SAVED, STEPS)), "stats": run.handle.stats()}
    again = Run(door, spec, seed=2)
    again.load(file)
    again.data = ahead
    return found | {"resumed": again.take(range(SAVED, STEPS))}


def changed(door: str) -> dict[str, Any]:
    """Change the spec in mid-training, first to a different one on rank 1, then alike."""
    run = Run(door, "topk:ratio=0.01")
    run.take(range(5))
    before = run.handle.residual()
    refused = small_net.refused(lambda: run.handle.change("sign" if doors.rank(door) == 1 else "dense"))
    run.handle.change("sdagc:lam=2")
    after = run.handle.residual()
    return {
        "refused": refused,
        "something waited": any(bool(left.any()) for left in before.values()),
        "carried": all(torch.equal(before[name], after[name]) for name in before),
        "weights": run.take(range(5, 10)),
        "steps": run.handle.stats()["steps"],
    }


def program(door: str, specs: list[str]) -> dict[str, Any]:
    """Train with every spec, and change the spec."""
    doors.join(door)
    if door == OWN:
        watch()
    found: dict[str, Any] = {spec: trained(door, spec) for spec in specs}
    return found | {"changed": changed(door)}


def simulated(spec: str, count: int, hosts: int) -> dict[str, Any]:
    """Train one model with the simulator's mean updates."""
    net, data = small_net.net(), [small_net.examples(rank) for rank in range(count)]
    optimizer = torch.optim.SGD(net.parameters(), 0.02)
    named = list(net.named_parameters())
    known: dict[str, Any] = {"optimizer": optimizer, "named_parameters": named}
    shapes = {name: tuple(parameter.shape) for name, parameter in named}
    simulation = gradcomp.Simulation(spec, shapes, count, bucket_mb=BUCKET_MB, ranks_per_host=count // hosts, **known)

    made = gradcomp.make(spec)

    def gradients(step: int) -> None:
        update = simulation.step(list(gradients_of(net, data, step)))
        for name, parameter in named:
            parameter.grad = update[name]

    def updates(step: int) -> None:
        own = [updates_of(optimizer, named, made, grads, count) for grads in [*gradients_of(net, data, step)]]
        update = simulation.step(own)
        for name, parameter in named:
            parameter.data.sub_(update[name])
            parameter.grad = None  # the optimizer has stepped

    weights = stepped(optimizer, range(STEPS), updates if made.traits.acts_on_updates else gradients, net)
    between = [reducer.traffic.between_hosts for reducer in simulation._reducers]
    return {"weights": weights, "bytes_sent": simulation.bytes_sent, "bytes_between_hosts": between}


def gradients_of(net: torch.nn.Module, data: list[Iterator[Any]], step: int) -> Iterator[dict[str, Tensor | None]]:
    """Yield every rank's gradients."""
    for rank, batches in enumerate(data):
        net.zero_grad()
        small_net.backward(net, next(batches), skip=skips(rank, step))
        yield {name: parameter.grad for name, parameter in net.named_parameters()}


def updates_of(
    optimizer: torch.optim.Optimizer, named: list[tuple[str, Any]], spec: Any, grads: dict[str, Tensor | None], count: int
) -> dict[str, Tensor]:
    """Return the updates that the optimizer makes of a rank's gradients, cut as the spec says. The weights stay.

    Simulation multiplies them by the effect of the spec's momentum, which here is the optimizer's rate.
    """
    effect = 1 / (1 - getattr(spec, "set_momentum", 0.0))
    clip, starts = getattr(spec, "clip", 0.0), {name: parameter.detach().clone() for name, parameter in named}
    layers = {name: grad.clone() for name, grad in grads.items() if grad is not None}
    whole = [[*layers.values()]] if clip and spec.clip_by == "model" else [[grad] for grad in layers.values()]
    for part in whole if clip else []:
        norm = torch.stack([grad.double().square().sum() for grad in part]).sum().sqrt()
        for grad in part:
            grad.mul_((clip / count**0.5 / (norm + 1e-6)).clamp(max=1).float())
    for name, parameter in named:
        parameter.grad = layers.get(name)
    (group,) = optimizer.param_groups
    group["lr"] *= effect
    optimizer.step()
    group["lr"] /= effect
    found = {name: (starts[name] - parameter.detach()) / effect for name, parameter in named}
    for name, parameter in named:
        parameter.data.copy_(starts[name])
    return found


def simulate(specs: list[str], count: int, hosts: int) -> dict[str, Any]:
    """Simulate this process's share of the specs."""
    rank, size = (int(os.environ[f"HOROVOD_{name}"]) for name in ("RANK", "SIZE"))
    return {spec: simulated(spec, count, hosts) for spec in specs[rank::size]}


@ranks.once
def found(door: str, count: int, hosts: int) -> list[dict[str, Any]]:
    return ranks.launch(program, count, door, STARTS[door, count, hosts], hosts=hosts)


@ranks.once
def expected(count: int, hosts: int) -> dict[str, Any]:
    """Two processes share the work; they are no ranks of one another."""
    specs = list(dict.fromkeys(spec for start, own in STARTS.items() if start[1:] == (count, hosts) for spec in own))
    return dict(item for share in ranks.launch(simulate, 2, specs, count, hosts) for item in share.items())


@every_case
def test_training_is_the_simulators(start: Start, spec: str) -> None:
    _, count, hosts = start
    wanted = expected(count, hosts)[spec]
    for rank, own in enumerate(found(*start)):
        for figure in ("bytes_sent", "bytes_between_hosts") if hosts > 1 else ("bytes_sent",):
            assert own[spec]["stats"][figure] == wanted[figure][rank]
        assert own[spec]["stats"]["steps"] == STEPS
        if count == 2 * hosts or spec not in REDUCED:
            assert torch.equal(own[spec]["weights"], wanted["weights"])


@every_case
def test_all_ranks_hold_the_same_weights(start: Start, spec: str) -> None:
    first, *others = (own[spec]["weights"] for own in found(*start))
    assert first.isfinite().all()
    assert all(torch.equal(first, other) for other in others)


@every_case
def test_a_loaded_state_continues_to_the_last_bit(start: Start, spec: str) -> None:
    for own in found(*start):
        assert torch.equal(own[spec]["resumed"], own[spec]["weights"])


@every_start
def test_the_spec_can_change_in_mid_training(start: Start) -> None:
    for own in found(*start):
        change = own["changed"]
        assert change["something waited"] and change["carried"] and change["steps"] == 10
        assert torch.equal(change["weights"], found(*start)[0]["changed"]["weights"])


@every_start
def test_a_change_that_differs_on_one_rank_is_refused_on_all(start: Start) -> None:
    for own in found(*start):
        assert "spec: rank 0 has 'dense', rank 1 has 'sign'" in own["changed"]["refused"]
