"""Steps that a GradScaler skips, and layers that begin late: with everything sent, training goes on as torch's own does."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from replicas import Replicas
from torch.optim import SGD, Adam, AdamW
from training import Named, OptimizerOf, draw, mean

SPEC = "topk:ratio=1,wire=exact"
LEFT = f"{SPEC},momentum=0"
SHAPES = {"a": (8, 8), "b": (8,)}
OPTIMIZERS: dict[str, tuple[OptimizerOf, str]] = {
    "sgd": (partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.1), SPEC),
    "nesterov": (partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True), SPEC),
    "fused": (partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.1, fused=True), SPEC),
    "adam": (partial(Adam, lr=0.1), LEFT),
    "adamw": (partial(AdamW, lr=0.1, weight_decay=0.1), LEFT),
}


class Pair:
    """A training on two ranks, with a bucket for each layer, beside torch's own."""

    def __init__(self, case: str, spec: str = "", shapes: Any = SHAPES):
        made, exact = OPTIMIZERS[case]
        self.ours, self.theirs = (Replicas(each, made, shapes, 2, 1, bucket_mb=1e-4) for each in (spec or exact, None))
        self.shapes, self.steps = shapes, 0
        self._scalers = [torch.amp.GradScaler("cpu", init_scale=1.0) for _ in range(3)]
        for each in self._scalers:
            each.scale(torch.ones(1))

    def step(self, bad: float = 0.0, names: set[str] | None = None) -> None:
        """Take a step by a GradScaler. bad: one of a rank's gradients has such an entry. names: of layers with gradients."""
        grads: list[Named] = draw(self.steps, self.shapes, 2, alike=True)
        grads = [{name: each.clone() for name, each in own.items() if names is None or name in names} for own in grads]
        of_torch = [mean(grads)]
        if bad:
            grads[1]["b"][3] = bad
            of_torch[0]["b"][3] = bad
        for training, given in ((self.ours, grads), (self.theirs, of_torch)):
            scalers = self._scalers[:2] if training is self.ours else self._scalers[2:]
            by_rank = {id(rank): each for rank, each in zip(training.ranks, zip(given, scalers, strict=True), strict=True)}
            for rank in training.ranks:
                for weight in rank.weights.values():
                    weight.grad = None
            training.each(lambda rank, by_rank=by_rank: self._step(rank, *by_rank[id(rank)]))  # type: ignore[misc]
        self.ours.check_equal()
        self.steps += 1

    def _step(self, rank: Any, grads: Named, scaler: Any) -> None:
        rank.backward(grads)
        exchanges = rank.session is not None
        step = rank.optimizer.step

        def whole(*arguments: Any, **options: Any) -> Any:
            if exchanges:
                rank.begin(rank.optimizer)
            result = step(*arguments, **options)
            if exchanges:
                rank.session.updates.after(rank.optimizer)
            return result

        rank.optimizer.step = whole
        try:
            scaler.step(rank.optimizer)
        finally:
            rank.optimizer.step = step
        scaler.update(1.0)

    def check(self) -> None:
        self.ours.ends_as(self.theirs, 1e-4, 1e-5)


@pytest.mark.parametrize("skipped", [1, 5])
@pytest.mark.parametrize("begin", [0, 3])
@pytest.mark.parametrize("case", OPTIMIZERS)
def test_steps_that_a_scaler_skips_leave_no_trace(case: str, begin: int, skipped: int) -> None:
    if case == "fused" and begin == 0:
        begin = 1  # torch's own leaves its momentum buffer uninitialised if its first step is skipped
    pair = Pair(case)
    for step in range(begin + 4):
        for bad in [math.inf, math.nan, -math.inf][: skipped if step == begin else 0] * 2:
            pair.step(bad)
        pair.step()
        pair.check()


@pytest.mark.parametrize("spec", ["topk:ratio=0.1", "sign", "sdagc:density=0.1", "orq", "blocks:feedback=true"])
@pytest.mark.parametrize("case", ["sgd", "adamw"])
def test_a_skipped_step_exchanges_nothing_and_changes_no_state(case: str, spec: str) -> None:
    pair = Pair(case, spec)
    for _ in range(3):
        pair.step()
    before = [copy.deepcopy(each["exchange"]) for each in pair.ours.states()]
    weights = pair.ours.copied()
    pair.step(math.inf)
    assert same(before, [each["exchange"] for each in pair.ours.states()])
    assert all(torch.equal(each, pair.ours.copied()[name]) for name, each in weights.items())


@pytest.mark.parametrize("spec", ["topk:ratio=1,wire=exact", "sign", "orq"])
def test_a_step_that_one_rank_alone_skips_takes_that_of_the_others(spec: str) -> None:
    """As where a program spoils its own gradient after backward(), and a fused optimizer leaves out the step."""
    ours, grads = Replicas(spec, partial(SGD, lr=0.1, fused=True), ranks=2), draw(0, ranks=2)
    before = ours.copied()
    ours.exchange(grads)
    for rank, skips in zip(ours.ranks, (0.0, 1.0), strict=True):
        rank.optimizer.grad_scale, rank.optimizer.found_inf = torch.tensor(1.0), torch.tensor(skips)  # type: ignore[attr-defined]
    ours.step()
    if spec == "topk:ratio=1,wire=exact":
        for name, now in ours.copied().items():
            torch.testing.assert_close(now, before[name] - 0.05 * grads[0][name])
    assert all(torch.equal(ours.ranks[0].weights[name], each) for name, each in ours.ranks[1].weights.items())


def test_a_fused_step_without_any_gradient_moves_nothing() -> None:
    """As of an optimizer whose layers are all frozen or unused: the GradScaler has checked no gradient, and sets a number."""
    ours = Replicas(SPEC, partial(SGD, lr=0.1, fused=True), ranks=2)
    before = ours.copied()
    ours.exchange([{}, {}])
    for rank in ours.ranks:
        rank.optimizer.grad_scale, rank.optimizer.found_inf = torch.tensor(1.0), 0  # type: ignore[attr-defined]
    ours.step()
    assert all(torch.equal(each, before[name]) for name, each in ours.copied().items())


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(each, other[name]) for name, each in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


# Layers that begin to train later than others of their bucket.
LATE = {"a": (6,), "b": (5,), "c": (4, 3), "d": (7,), "e": (3,)}
BEGINS = {"a": 4, "b": 0, "c": 4, "d": 9, "e": 0}


@pytest.mark.parametrize("freezes", [False, True])
@pytest.mark.parametrize("case", [case for case in OPTIMIZERS if case != "fused"])
def test_a_layer_that_begins_late_moves_as_in_torch(case: str, freezes: bool) -> None:
    """It has no gradient before, or is frozen. Adam counts the steps of each layer by itself."""
    pair = Pair(case, shapes=LATE)
    for step in range(16):
        begun = {name for name, first in BEGINS.items() if step >= first}
        for training in (pair.ours, pair.theirs):
            training.freeze(*(set(LATE) - begun if freezes else ()))
        pair.step(math.nan if step in (2, 5, 10) else 0.0, begun)
        pair.check()


@pytest.mark.parametrize("freezes", [False, True])
def test_a_resumed_training_counts_on(freezes: bool) -> None:
    first = Replicas("topk:ratio=0.3", OPTIMIZERS["adamw"][0], LATE, 2)

    def train(training: Replicas, steps: range) -> None:
        for step in steps:
            begun = {name for name, begin in BEGINS.items() if step >= begin}
            training.freeze(*(set(LATE) - begun if freezes else ()))
            training.step([{name: own[name] for name in own if name in begun} for own in draw(step, LATE, 2)])

    train(first, range(7))
    second = first.resumed()
    for each in (first, second):
        train(each, range(7, 14))
    first.ends_as(second, 0, 0)
