"""The exchange around optimizers' steps: one for each, whichever they are, and its end where gradients follow updates."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from replicas import Replica, Replicas
from torch import nn, optim
from torch.optim import SGD, AdamW, Optimizer
from training import SHAPES, draw

ALL = "topk:ratio=1,wire=exact"
sgd = partial(SGD, lr=0.05, momentum=0.9)


def two(weights: Any) -> list[Optimizer]:
    a, b, *rest = weights
    return [SGD([a, b], lr=0.05, momentum=0.5, nesterov=True), SGD(rest, lr=0.02, momentum=0.9, weight_decay=0.1)]


def unlike(weights: Any) -> list[Optimizer]:
    a, b, *rest = weights
    return [SGD([a, b], lr=0.05, momentum=0.9), optim.Adagrad(rest, lr=0.02)]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("optimizers_of", [two, unlike])
def test_with_everything_sent_each_of_several_optimizers_steps_as_alone(optimizers_of: Any, ranks: int) -> None:
    ours, theirs = (Replicas(spec, optimizers_of, ranks=ranks) for spec in (ALL, None))
    for training in (ours, theirs):
        training.train(6, alike=True)
        for step in range(6, 12):  # and one of them steps in some steps alone
            training.exchange(draw(step, ranks=ranks, alike=True))
            training.each(lambda rank: rank.step(rank.optimizers[0]))  # type: ignore[arg-type,return-value]
    ours.ends_as(theirs)


def test_what_waits_of_an_optimizer_stays_while_another_one_steps() -> None:
    ours = Replicas("topk:ratio=0.05", two, ranks=2).train(5)
    before = ours.residual()
    ours.exchange(draw(5, ranks=2))
    ours.each(lambda rank: rank.step(rank.optimizers[0]))
    after = ours.residual()
    for name in list(SHAPES)[2:]:
        assert before[name].any() and torch.equal(before[name], after[name])


def test_an_optimizer_that_replaces_another_keeps_what_waits() -> None:
    ours = Replicas("topk:ratio=0.05", sgd, ranks=2).train(5)
    before = ours.residual()
    for rank in ours.ranks:
        rank.optimizers = [AdamW(rank.weights.values(), lr=0.0)]
    ours.train(1, 5)
    after = ours.residual()
    assert any(before[name].any() for name in SHAPES)
    left = sum(float((before[name] == after[name]).sum()) for name in SHAPES)
    assert left > 0.8 * sum(before[name].numel() for name in SHAPES), "5 % are sent, and nothing else changes"


def test_an_optimizer_of_another_model_is_none_of_its_business() -> None:
    ours = Replicas("topk:ratio=0.1", sgd, ranks=1).train(2)
    before, other = ours.states(), SGD([nn.Parameter(torch.ones(3))], lr=0.1)
    other.param_groups[0]["params"][0].grad = torch.ones(3)
    ours.ranks[0].step(other)
    assert other.param_groups[0]["params"][0].tolist() == pytest.approx([0.9] * 3)
    assert before[0]["exchange"]["of_rank"]["0"]["steps"] == ours.states()[0]["exchange"]["of_rank"]["0"]["steps"] == 2


def test_the_innermost_step_exchanges_and_no_other() -> None:
    """As Horovod's optimizer, whose step() calls the step() of its class."""
    ours, theirs = (Replicas(spec, sgd) for spec in (ALL, None))
    for step in range(6):
        rank: Replica = ours.ranks[0]
        rank.backward(draw(step)[0])
        for _ in range(2):
            rank.begin(rank.optimizer)
        rank.optimizer.step()
        for _ in range(2):
            rank.session.steps.after(rank.optimizer)
        theirs.train(1, step)
    ours.ends_as(theirs)
    assert ours.ranks[0].session.reducer.steps_done == 6


@pytest.mark.parametrize("after", ["dense", "half", "blocks"])
@pytest.mark.parametrize("spec", ["topk:ratio=0.05", "sign", ALL])
def test_a_change_to_gradients_delivers_all_that_waits(spec: str, after: str) -> None:
    """The mean of all residuals moves the weights at once: nothing waits, and nothing is lost."""
    ours = Replicas(spec, sgd, ranks=2, size=0).train(8)
    meant = {name: waits - ours.copied()[name] for name, waits in ours.residual().items()}
    ours.change(after)
    ours.check_equal()
    for name, each in meant.items():
        torch.testing.assert_close(-ours.copied()[name], each, rtol=1e-5, atol=1e-6)
        assert not ours.residual()[name].any()
    ours.train(6, 8)


@pytest.mark.parametrize("optimizer_of", [sgd, partial(AdamW, lr=0.01), partial(optim.RMSprop, lr=0.01, momentum=0.9)])
def test_after_a_change_to_gradients_all_optimizers_have_one_state(optimizer_of: Any) -> None:
    ours = Replicas("topk:ratio=0.1", optimizer_of, ranks=3).train(8)
    ours.change("dense")
    first, *others = [rank.optimizer.state_dict()["state"] for rank in ours.ranks]
    for other in others:
        for number, own in first.items():
            for name, value in own.items():
                assert not isinstance(value, torch.Tensor) or torch.equal(value, other[number][name]), name
    for state in first.values():
        for name in ("momentum_buffer", "exp_avg"):
            assert name not in state or not state[name].any(), "its effect has been delivered"
    ours.train(4, 8)
    ours.change("topk:ratio=0.1")
    ours.train(4, 12)
