"""Every kind of spec on real ranks, by each door: training is the simulator's, to the last bit, also across a checkpoint."""

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
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import gradcomp

pytestmark = pytest.mark.slow

# The third door, beside the two to Horovod.
DDP = "ddp"
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
    "topk:ratio=0.02,momentum=0.9,route=split",
    "gtopk:ratio=0.02,momentum=0.9,clip=1",
    "sketched_sgd:ratio=0.02",
    "orq:levels=5,route=alltoall",
    "sign",
]
SPECS = list(
    dict.fromkeys(
        [
            *(KNOBS.get(name, name) for name in gradcomp.names()),
            *REDUCED,
            *GATHERED_OR_SENT,
            "topk; *.bias=dense; last.*=sign",
            "lgc:dense=2,learn=3,ratio=0.02,first=dense,momentum=0.9",
            "sdagc:density=0.02,small=pool,momentum=0.9",
            "sdagc:lam=2,sam=0.9,flush=5,clip=1,warmup=5",
            "sdagc:lam=2,wire=exact",
            "sdagc:lam=2,momentum=0.9,clip=1,clip_by=model",
            "sdagc:density=0.05,lr_revision=density",
            "sdagc; *.bias=dense; *last.*=topk:ratio=0.1",
        ]
    )
)
# Door, and number of ranks.
STARTS = [(doors.COMPRESSION, 2), (doors.OWN, 2), (DDP, 2), (DDP, 3)]
CASES = [(*start, spec) for start in STARTS for spec in (SPECS if start[1] == 2 else REDUCED + GATHERED_OR_SENT)]
every_case = pytest.mark.parametrize("door, count, spec", CASES)
every_start = pytest.mark.parametrize("door, count", STARTS)


class Run:
    """A model in training by one of the doors."""

    def __init__(self, door: str, spec: str, seed: int = 1):
        self.net = small_net.net(seed)
        if door == DDP:
            self.optimizer: Any = torch.optim.SGD(self.net.parameters(), 0.02)
            self.whole: Any = DistributedDataParallel(self.net, bucket_cap_mb=BUCKET_MB, find_unused_parameters=True)
            self.handle = gradcomp.ddp.attach(self.whole, spec, optimizer=self.optimizer, bucket_mb=BUCKET_MB)
            self.rank = dist.get_rank()
        else:
            self.whole = self.net
            self.optimizer = doors.sgd(door, self.net, spec, bucket_mb=BUCKET_MB)
            self.handle = self.optimizer.compression
            self.rank = hvd.rank()
        self.data = small_net.examples(self.rank)

    def train(self, steps: range) -> Tensor:
        return stepped(self.optimizer, steps, lambda step: backward(self.whole, self.data, self.rank, step), self.net)

    def saved(self) -> io.BytesIO:
        file = io.BytesIO()
        torch.save((self.net.state_dict(), self.handle.state_dict()), file)
        file.seek(0)
        return file

    def load(self, file: io.BytesIO) -> None:
        for part, state in zip((self.net, self.handle), torch.load(file), strict=True):
            part.load_state_dict(state)


def backward(net: torch.nn.Module, data: Iterator[Any], rank: int, step: int) -> None:
    """Run a batch forward and backward; each rank leaves a layer out now and then."""
    small_net.backward(net, next(data), skip=(step + rank) % 5 == 0)


def stepped(optimizer: Any, steps: range, gradients: Callable[[int], None], net: torch.nn.Module) -> Tensor:
    """Train with a learning rate that falls."""
    for step in steps:
        optimizer.param_groups[0]["lr"] = 0.02 / (1 + step // 3)
        optimizer.zero_grad()
        gradients(step)
        optimizer.step()
    return small_net.weights(net)


def trained(door: str, spec: str) -> dict[str, Any]:
    """Train to the end; and with new objects from the middle, out of a file."""
    run = Run(door, spec)
    run.train(range(SAVED))
    file = run.saved()
    ahead = itertools.tee(run.data)
    run.data = ahead[0]
    found = {"weights": run.train(range(SAVED, STEPS)), "stats": run.handle.stats()}
    again = Run(door, spec, seed=2)
    again.load(file)
    again.data = ahead[1]
    return found | {"resumed": again.train(range(SAVED, STEPS))}


def changed(door: str) -> dict[str, Any]:
    """Change the spec in mid-training, first to a different one on rank 1, then alike."""
    run = Run(door, "topk:ratio=0.01")
    run.train(range(5))
    before = run.handle.residual()
    refused = small_net.refused(lambda: run.handle.change("sign" if run.rank == 1 else "dense"))
    run.handle.change("sdagc:lam=2")
    after = run.handle.residual()
    return {
        "refused": refused,
        "something waited": any(bool(left.any()) for left in before.values()),
        "carried": all(torch.equal(before[name], after[name]) for name in before),
        "weights": run.train(range(5, 10)),
        "steps": run.handle.stats()["steps"],
    }


def program(door: str, specs: list[str]) -> dict[str, Any]:
    """Train with every spec, and change the spec."""
    if door == DDP:
        ranks.join()
    else:
        hvd.init()
    found: dict[str, Any] = {spec: trained(door, spec) for spec in specs}
    return found | {"changed": changed(door)}


def simulated(spec: str, count: int) -> dict[str, Any]:
    """Train one model with the simulator's mean updates."""
    net, data = small_net.net(), [small_net.examples(rank) for rank in range(count)]
    optimizer = torch.optim.SGD(net.parameters(), 0.02)
    named = list(net.named_parameters())
    shapes = {name: tuple(parameter.shape) for name, parameter in named}
    simulation = gradcomp.Simulation(spec, shapes, count, bucket_mb=BUCKET_MB, optimizer=optimizer, named_parameters=named)

    def gradients(step: int) -> None:
        update = simulation.step(list(gradients_of(net, data, step)))
        for name, parameter in named:
            parameter.grad = update[name]

    return {"weights": stepped(optimizer, range(STEPS), gradients, net), "bytes": simulation.bytes_sent}


def gradients_of(net: torch.nn.Module, data: list[Iterator[Any]], step: int) -> Iterator[dict[str, Tensor | None]]:
    """Yield every rank's gradients."""
    for rank, batches in enumerate(data):
        net.zero_grad()
        backward(net, batches, rank, step)
        yield {name: parameter.grad for name, parameter in net.named_parameters()}


def simulate(specs: list[str], count: int) -> dict[str, Any]:
    """Simulate this process's share of the specs."""
    rank, size = (int(os.environ[f"HOROVOD_{name}"]) for name in ("RANK", "SIZE"))
    return {spec: simulated(spec, count) for spec in specs[rank::size]}


@ranks.once
def found(door: str, count: int) -> list[dict[str, Any]]:
    specs = [spec for *start, spec in CASES if start == [door, count]]
    return ranks.launch(program, count, door, specs)


@ranks.once
def expected(count: int) -> list[dict[str, Any]]:
    """Two processes share the work; they are no ranks of one another."""
    specs = list(dict.fromkeys(spec for _, ranks_, spec in CASES if ranks_ == count))
    return ranks.launch(simulate, 2, specs, count)


@every_case
def test_training_is_the_simulators(door: str, count: int, spec: str) -> None:
    wanted = next(share[spec] for share in expected(count) if spec in share)
    for rank, own in enumerate(found(door, count)):
        assert own[spec]["stats"]["bytes_sent"] == wanted["bytes"][rank]
        assert own[spec]["stats"]["steps"] == STEPS
        if count == 2 or spec not in REDUCED:
            assert torch.equal(own[spec]["weights"], wanted["weights"])


@every_case
def test_all_ranks_hold_the_same_weights(door: str, count: int, spec: str) -> None:
    first, *others = (own[spec]["weights"] for own in found(door, count))
    assert first.isfinite().all()
    assert all(torch.equal(first, other) for other in others)


@every_case
def test_a_loaded_state_continues_to_the_last_bit(door: str, count: int, spec: str) -> None:
    for own in found(door, count):
        assert torch.equal(own[spec]["resumed"], own[spec]["weights"])


@every_start
def test_the_spec_can_change_in_mid_training(door: str, count: int) -> None:
    for own in found(door, count):
        change = own["changed"]
        assert change["something waited"] and change["carried"] and change["steps"] == 10
        assert torch.equal(change["weights"], found(door, count)[0]["changed"]["weights"])


@every_start
def test_a_change_that_differs_on_one_rank_is_refused_on_all(door: str, count: int) -> None:
    for own in found(door, count):
        assert "spec: rank 0 has 'dense:feedback=true', rank 1 has 'sign'" in own["changed"]["refused"]
