"""Layers whose rates differ widely share no bucket, and all ranks divide them alike."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from replicas import Replicas
from threads import Generation
from torch import optim
from torch.optim import SGD, AdamW, Optimizer
from training import draw

from gradcomp.engine.updates import steps


def tuned(weights: Any) -> Optimizer:
    """A backbone with a bias without weight decay, and a head whose rate is 100 times as large, all with a warm-up from 0."""
    first, second, bias, head = weights
    groups = [{"params": [first, second], "lr": 1e-4}, {"params": [bias], "lr": 1e-4, "weight_decay": 0.0}, {"params": [head]}]
    made = SGD(groups, lr=0.01, momentum=0.9, weight_decay=1e-3)
    optim.lr_scheduler.LambdaLR(made, lambda step: min(1.0, step / 10))
    return made


RATES = {"a": 1e-4, "b": 1e-2}


def warmed(training: Replicas, first: int, last: int, both: bool) -> None:
    """Step with a warm-up from 0 that a program writes by itself, of both layers or of the slow one."""
    for step in range(first, last):
        for rank in training.ranks:
            for group, rate in zip(rank.optimizer.param_groups, RATES.values(), strict=True):
                group["lr"] = rate * (min(1.0, step / 5) if both or rate < 0.01 else 1.0)
        training.step(draw(step, training.shapes, len(training.ranks)))
        training.check_equal()


@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize("case", ["one loads", "one joins", "resumed"])
def test_ranks_divide_layers_by_rates_alike_whenever_they_look(case: str, both: bool) -> None:
    def groups(weights: Any) -> Optimizer:
        return AdamW([{"params": [each]} for each in weights])

    ours = Replicas("topk", groups, {"a": (500,), "b": (300,)}, 2)
    warmed(ours, 0, 3, both)
    if case == "one loads":
        ours.ranks[1].optimizer.load_state_dict(ours.ranks[1].optimizer.state_dict())
    elif case == "resumed":
        ours = ours.resumed()
    else:
        changes = steps.changes
        others = Replicas("topk", groups, ours.shapes, 3)
        for rank in others.ranks:
            steps.ignore(rank.session)
        steps.changes = changes  # as in a process of its own
        ours.ranks.append(others.ranks[2])
        ours.count = 3
        generation = Generation(3)
        for number, rank in enumerate(ours.ranks):
            rank.session.network.move(generation, number)
            rank.optimizer.load_state_dict(ours.ranks[0].optimizer.state_dict())
            for name, weight in rank.weights.items():
                weight.data.copy_(ours.weights[name])
        ours.each(lambda rank: rank.session.resume.sync())
    warmed(ours, 3, 8, both)
    for rank in ours.ranks:
        found = sorted(bucket.layout.names for bucket in rank.session.reducer.buckets)
        assert found == [("a",), ("b",)], "by what was first seen; a rate of 0 beside others counts as slow"


class Own(Optimizer):
    """Finds its rates by itself, as the Adafactor of transformers does."""

    def __init__(self, weights: Any, **settings: Any):
        super().__init__([{"params": [each]} for each in weights], settings)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for each in (each for group in self.param_groups for each in group["params"]):
            each.add_(each.grad, alpha=-0.01)


@pytest.mark.parametrize("settings", [{}, {"lr": None}, {"lr": torch.tensor(0.1)}])
def test_an_optimizer_may_have_no_rate(settings: dict[str, Any]) -> None:
    Replicas("topk", partial(Own, **settings), ranks=2).train(3)


@pytest.mark.parametrize("spec", ["topk", "sdagc:density=0.01"])
def test_layers_of_a_small_rate_are_not_left_out_beside_faster_ones(spec: str) -> None:
    """With all layers in one bucket, the backbone does not move in the first 1,000 steps."""
    shapes = {"first": (2000,), "second": (2000,), "bias": (50,), "head": (4000,)}
    ours, theirs = (Replicas(each, tuned, shapes, 2) for each in (spec, None))
    begun, grads = ours.copied(), {name: torch.full(shape, 0.3) for name, shape in shapes.items()}
    for step in range(300):
        noisy = [{name: each + own[name] for name, each in grads.items()} for own in draw(step, shapes, 2)]
        for training in (ours, theirs):
            training.step(noisy)
            if step == 10:
                training.set(lr=0.01)
                for rank in training.ranks:
                    for group in rank.optimizer.param_groups[:2]:
                        group["lr"] = 1e-4
    moved = [{name: float((each.copied()[name] - begun[name]).mean()) for name in shapes} for each in (ours, theirs)]
    assert all(moved[0][name] == pytest.approx(moved[1][name], rel=0.5) for name in shapes), moved
    layers = [{*bucket.layout.names} for bucket in ours.ranks[0].session.reducer.buckets]
    assert all("head" not in of or of == {"head"} for of in layers) and {"first", "second", "bias"} in layers
    again = ours.resumed()
    again.step(draw(300, shapes, 2))
    assert layers == [{*bucket.layout.names} for bucket in again.ranks[0].session.reducer.buckets]


@pytest.mark.parametrize("optimizers", [1, 2])
def test_the_models_gradient_is_clipped_by_its_own_norm_where_layers_are_divided(optimizers: int) -> None:
    """Also by the first of two optimizers, whose layers the second one then finds clipped."""
    rates = {"a": 1e-4, "b": 1e-2}

    def made(weights: Any) -> Any:
        groups = [{"params": [weight], "lr": rate} for weight, rate in zip(weights, rates.values(), strict=True)]
        return SGD(groups) if optimizers == 1 else [SGD([group]) for group in groups]

    ours = Replicas("topk:ratio=1,wire=exact,clip=0.1,clip_by=model", made, {"a": (500,), "b": (300,)}, 1)
    before = ours.copied()
    ours.step(draw(0, ours.shapes, 1))
    assert len(ours.ranks[0].session.reducer.buckets) == 2
    clipped = [(before[name] - each) / rates[name] for name, each in ours.copied().items()]
    assert torch.stack([each.norm() for each in clipped]).norm() == pytest.approx(0.1, rel=0.01)
