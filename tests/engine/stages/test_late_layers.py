"""Layers that begin to train later than others of their bucket: Adam counts the steps of each, as torch does."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch.optim import Adam, AdamW
from training import Named, OptimizerOf, Training, draw, mean

from gradcomp.engine.stages.adam import UNBIASED

SPEC = "topk:ratio=1,wire=exact"
SHAPES = {"a": (6,), "b": (5,), "c": (4, 3), "d": (7,), "e": (3,)}
# The first step of each layer.
BEGINS = {"a": 4, "b": 0, "c": 4, "d": 9, "e": 0}
RANKS = 2
adamw = partial(AdamW, lr=0.05, betas=(0.8, 0.95), weight_decay=0.1)


class Late(Training):
    """A training of layers that begin late: they have no gradient before, or are frozen."""

    def __init__(self, spec: str | None, freezes: bool = False, optimizer_of: OptimizerOf = adamw):
        super().__init__(spec, optimizer_of, SHAPES, RANKS)
        self.freezes = freezes

    def at(self, step: int, bad: float = 0.0) -> None:
        """Take a step, which is skipped if a bad gradient is among those of the layer b."""
        begun = {name for name, first in BEGINS.items() if step >= first}
        if self.freezes:
            for name, weight in self.weights.items():
                weight.requires_grad_(name in begun)
        grads: list[Named] = [{name: own[name] for name in own if name in begun} for own in draw(step, SHAPES, RANKS, True)]
        for own in grads:
            own["b"] += bad
        updates = mean(grads) if self.simulation is None else self.simulation.step(grads)
        if not bad:
            for name, weight in self.weights.items():
                weight.grad = updates[name].clone() if name in begun else None
            self.optimizer.step()

    def over(self, *steps: int) -> Late:
        for step in steps:
            self.at(step)
        return self

    def steps(self) -> list[dict[str, int]]:
        return [layers["steps"] for layers in self.layers("adam")]


freezing = pytest.mark.parametrize("freezes", [False, True])


@freezing
@pytest.mark.parametrize("optimizer_of", [adamw, partial(Adam, lr=0.05, weight_decay=0.1)])
def test_a_layer_that_begins_late_moves_as_in_torch(freezes: bool, optimizer_of: OptimizerOf) -> None:
    ours, theirs = (Late(spec, freezes, optimizer_of).over(*range(16)) for spec in (SPEC, None))
    ours.ends_as(theirs, rtol=1e-5, atol=1e-6)
    assert ours.steps() == [{name: 16 - first for name, first in BEGINS.items()}] * RANKS


@freezing
def test_a_resumed_training_counts_on(freezes: bool) -> None:
    first, second = Late(SPEC, freezes).over(*range(7)), Late(SPEC, freezes)
    second.copy(first)
    second.simulation.load_state_dict(first.simulation.state_dict())
    first.over(*range(7, 14)).ends_as(second.over(*range(7, 14)), 0, 0)


@freezing
def test_the_optimizer_gets_the_steps_of_each_layer_and_gives_them_back(freezes: bool) -> None:
    ours, theirs = (Late(spec, freezes).over(*range(12)) for spec in (SPEC, None))
    ours.simulation.change("dense:momentum=0")
    for training in (ours, theirs):
        training.over(12, 13)
    for name, weight in ours.weights.items():
        assert ours.optimizer.state[weight]["step"] == 14 - BEGINS[name]
    ours.simulation.change(SPEC)
    for training in (ours, theirs):
        training.over(*range(14, 18))
    ours.ends_as(theirs)
    assert ours.steps()[0] == {name: 18 - first for name, first in BEGINS.items()}


@freezing
def test_a_skipped_step_counts_for_no_layer(freezes: bool) -> None:
    ours, theirs = Late(SPEC, freezes), Late(None, freezes)
    for step in range(14):
        if step in (2, 4, 5, 10):
            ours.at(step, math.nan)
        for training in (ours, theirs):
            training.at(step)
    assert ours.steps() == [{name: 14 - first for name, first in BEGINS.items()}] * RANKS


def test_layers_are_one_launch_again_once_no_float_shows_a_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, launches = Late(SPEC), 0
    from gradcomp.native import extension

    accumulate = extension.native.accumulate

    def counted(*args: object, **queue: object) -> None:
        nonlocal launches
        launches += 1
        accumulate(*args, **queue)

    monkeypatch.setattr(extension.native, "accumulate", counted)
    enough = math.ceil(math.log(UNBIASED) / math.log(0.95))
    seen = []
    for step in range(12 + enough):
        launches = 0
        ours.at(step)
        seen.append(launches // RANKS)
    assert seen[:4] == [1] * 4 and seen[9] == 5 and seen[-1] == 1
    assert torch.isfinite(ours.weights["a"]).all()
