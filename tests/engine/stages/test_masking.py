"""Masking: an entry that waited loses its momentum when it is sent; an entry of which nothing was left keeps it."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, AdamW
from training import OptimizerOf, Training

import gradcomp
from gradcomp.exchanges.routes import ROUTES

STEPS, LATE = 12, 5
SPECS = [
    "topk:ratio=0.5,wire=exact",
    "topk:ratio=0.5,wire=exact,route=split",
    "topk:ratio=0.5,wire=exact,route=tree",
    "topk:ratio=1,wire=exact,by_host=true",
    "sdagc:lam=0.5,wire=exact,cap=1",
]
OPTIMIZERS: dict[str, OptimizerOf] = {
    "sgd": partial(SGD, lr=0.1, momentum=0.9),
    "nesterov": partial(SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": partial(AdamW, lr=0.1),
}


def gradient(step: int) -> Tensor:
    """The first rows have a gradient in each step, and the last ones in one step alone, as rows of an embedding have."""
    grad = torch.zeros(64, 64)
    grad[:16] = 1 + torch.rand(16, 64, generator=torch.Generator().manual_seed(step))
    if step == LATE:
        grad[48:] = 2.0
    return grad


@pytest.mark.parametrize("case", OPTIMIZERS)
@pytest.mark.parametrize("spec", SPECS)
def test_an_entry_that_nothing_came_for_has_not_waited(spec: str, case: str) -> None:
    ours, theirs = (Training(each, OPTIMIZERS[case], {"x": (64, 64)}, 4, 0, ranks_per_host=2) for each in (spec, None))
    for step in range(STEPS):
        for training in (ours, theirs):
            training.step([{"x": gradient(step)}] * 4)
        assert not ours.simulation.residual(0)["x"].any(), "all is sent"
    assert theirs.weights["x"][48:].abs().min() > 0.1
    ours.ends_as(theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("spec", ["topk:ratio=0.5,wire=exact", "topk:ratio=0.5,wire=exact,by_host=true"])
def test_an_entry_that_waited_has_no_momentum_on_any_rank(spec: str) -> None:
    """With by_host, a residual lies on one rank of a host, and velocities on all."""
    ours = Training(spec, partial(SGD, lr=0.1, momentum=0.5), {"x": (64,)}, 4, ranks_per_host=2)
    large = torch.arange(64) % 2 == 0
    ours.simulation.step([{"x": torch.where(large, 8.0, 1.0)}] * 4)
    sent = ours.simulation.step([{"x": torch.where(large, -4.0, 0.0)}] * 4)["x"]  # the large velocities become 0
    assert torch.equal(sent, torch.where(large, 0.0, 1.5))
    assert not any(layers["velocity"]["x"].any() for layers in ours.layers("sgd"))


@pytest.mark.parametrize("route", ROUTES)
def test_the_velocity_of_an_entry_that_waited_is_cleared(route: str) -> None:
    """Three steps by hand. Without a new gradient, a velocity u adds u / 2. A bucket so small has no parts to split."""
    simulation = gradcomp.Simulation(f"topk:ratio=0.25,momentum=0.5,wire=exact,route={route}", {"w": (4,)}, 1)
    sent = [simulation.step([{"w": torch.tensor(grad)}])["w"].tolist() for grad in ([8.0, 7.0, 1.0, 1.0], [0.0] * 4, [0.0] * 4)]
    # Entry 0 has not waited, and its velocity goes on: 8 / 2 + 8 / 4. Entry 1 has waited a step.
    assert sent == [[8.0, 0.0, 0.0, 0.0], [0.0, 10.5, 0.0, 0.0], [6.0, 0.0, 0.0, 0.0]]
    assert simulation.residual(0)["w"].tolist() == [0.0, 0.0, 1.75, 1.75]


@pytest.mark.parametrize("route", ["split", "tree"])
def test_an_entry_that_is_put_back_has_not_been_sent(route: str) -> None:
    """Each rank takes entries of its own, of which the sums that are sent on have some. A step that fails sends none."""
    ours = Training(f"topk:ratio=0.05,wire=exact,route={route}", OPTIMIZERS["sgd"], {"x": (64, 64)}, 4)
    grads = [torch.randn(64, 64, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]
    for grad in grads:
        grad[0, 0] = 9.0
    arrived = ours.simulation.step([{"x": grad} for grad in grads])["x"].flatten() != 0
    for rank, own in enumerate(last_sent(ours)):
        taken = torch.zeros(4096, dtype=torch.bool).index_fill_(0, grads[rank].flatten().abs().topk(205).indices, True)
        assert torch.equal(own == 1, taken & arrived) and not (taken <= arrived).all()
    ours.simulation.step([{"x": torch.full((64, 64), math.inf if rank == 2 else 1.0)} for rank in range(4)])
    assert not any((own == 2).any() for own in last_sent(ours))


def last_sent(training: Training) -> list[Tensor]:
    """List, for each rank, the step in which each entry was last sent."""
    shares = training.simulation.state_dict()["of_rank"].values()
    return [share["buckets"][0]["stages"]["feedback"]["last_sent"].flatten() for share in shares]


def test_without_error_feedback_nothing_is_masked() -> None:
    """No residual doubles the momentum: an entry that is sent now and then keeps its velocity."""
    ours = Training("topk:ratio=0.25,feedback=false", OPTIMIZERS["sgd"], {"x": (64,)}, 2).train(10)
    share, *_ = ours.simulation.state_dict()["of_rank"].values()
    assert share["buckets"][0]["stages"]["feedback"]["last_sent"] is None
