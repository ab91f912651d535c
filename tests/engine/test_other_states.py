"""Optimizers that are emptied, rolled back, saved and loaded, or maximize: training goes on as torch's own does."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.optim import SGD, AdamW
from training import OptimizerOf, Training

SPEC = "topk:ratio=1,wire=exact"
OPTIMIZERS: dict[str, OptimizerOf] = {
    "sgd": partial(SGD, lr=0.05, momentum=0.9, weight_decay=0.1),
    "adamw": partial(AdamW, lr=0.02, weight_decay=0.1),
}
of_both = pytest.mark.parametrize("case", OPTIMIZERS)


def pair(case: str, spec: str = SPEC, ranks: int = 2, **options: bool) -> tuple[Training, Training]:
    """Return a training with the spec and torch's own, with the same weights."""
    ours, theirs = (Training(each, partial(OPTIMIZERS[case], **options), ranks=ranks) for each in (spec, None))
    return ours, theirs


def clear(training: Training) -> None:
    training.optimizer.state.clear()


def replace_state(training: Training) -> None:
    training.optimizer.state = defaultdict(dict)


def load_nothing(training: Training) -> None:
    state = training.optimizer.state_dict()
    for group in state["param_groups"]:
        group.pop("gradcomp", None)  # as before the first step
    training.optimizer.load_state_dict({**state, "state": {}})


@pytest.mark.parametrize("act", [clear, replace_state, load_nothing])
@of_both
def test_an_emptied_state_begins_anew(case: str, act: Callable[[Training], None]) -> None:
    ours, theirs = pair(case)
    for training in (ours, theirs):
        for first in (0, 6, 9):
            training.train(3, first)
            act(training)
        training.train(6, 12)
    ours.ends_as(theirs)


@of_both
def test_one_layers_state_is_emptied_between_two_changes_of_the_spec(case: str) -> None:
    """As where a layer is made anew. The moments of the others go on."""
    ours, theirs = pair(case, ranks=1)
    for training in (ours, theirs):
        training.train(5)
        if training is ours:
            training.simulation.change(f"{SPEC},momentum=0")
        weight = next(iter(training.weights.values()))
        assert training.optimizer.state.pop(weight)
        weight.data.fill_(0.1)
        if training is ours:
            training.simulation.change(SPEC)
        training.train(6, 5)
    ours.ends_as(theirs)


@of_both
def test_a_rolled_back_state_begins_anew_and_nothing_of_the_abandoned_steps_arrives(case: str) -> None:
    """As a learning-rate finder's: the state was saved before the first step."""
    every = []
    for spec in ("topk:ratio=0.2,wire=exact", None):
        training = Training(spec, OPTIMIZERS[case], ranks=2)
        weights, state = copy.deepcopy((training.weights, training.optimizer.state_dict()))
        training.train(8, 50)
        for name, weight in training.weights.items():
            weight.data.copy_(weights[name])
        training.optimizer.load_state_dict(state)
        if spec is not None:
            training.simulation.change(SPEC)
        every.append(training.train(6))
    every[0].ends_as(every[1])


@of_both
def test_a_state_that_is_saved_and_loaded_at_once_changes_nothing(case: str) -> None:
    ours, theirs = pair(case)
    for training in (ours, theirs):
        for first in (0, 3, 6):
            training.train(3, first)
            state = training.optimizer.state_dict()
            state["param_groups"][0]["lr"] *= 1.5
            training.optimizer.load_state_dict(state)
        training.train(3, 9)
    ours.ends_as(theirs)


@of_both
def test_our_state_is_not_forgotten_for_the_optimizers_that_comes_with_it(case: str) -> None:
    for ours_first in (True, False):
        ours, theirs = pair(case)
        for training in (ours, theirs):
            training.train(5)
        saved = copy.deepcopy((ours.optimizer.state_dict(), ours.simulation.state_dict()))
        kept = copy.deepcopy([each.data for each in ours.weights.values()])
        ours.train(3, 40)
        for weight, before in zip(ours.weights.values(), kept, strict=True):
            weight.data.copy_(before)
        loads = [
            partial(ours.simulation.load_state_dict, saved[1]),
            partial(ours.optimizer.load_state_dict, saved[0]),
        ]
        for load in loads if ours_first else reversed(loads):
            load()
        for training in (ours, theirs):
            training.train(5, 5)
        ours.ends_as(theirs)


@of_both
def test_moments_of_a_maximizing_optimizer_change_hands_with_their_sign(case: str) -> None:
    """Both ways: from torch's own state, and back. One group minimizes."""

    def of_groups(weights: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        first, *rest = weights
        groups = [{"params": [first], "maximize": False}, {"params": rest}]
        made: torch.optim.Optimizer = OPTIMIZERS[case](groups, maximize=True)
        return made

    half = Training(None, of_groups, ranks=2).train(5)
    ours, theirs = half.resumed(SPEC), half.resumed(None)
    for training in (ours, theirs):
        training.train(5, 5)
    ours.ends_as(theirs)
    ours.simulation.change("dense:momentum=0")
    for training in (ours, theirs):
        training.train(5, 10)
    ours.ends_as(theirs)
    for weight in ours.weights.values():
        mine, torchs = ours.optimizer.state[weight], theirs.optimizer.state
        name = "momentum_buffer" if case == "sgd" else "exp_avg"
        torch.testing.assert_close(mine[name], next(torchs[each][name] for each in torchs if each.shape == weight.shape))
