"""The usual checkpoint, of model and optimizer alone: its moments are missing, which is said where training goes on without."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any

import pytest
from torch.optim import SGD, AdamW
from training import OptimizerOf, Training

SPEC = "topk:ratio=0.2"
MISSING = r"goes on without the moments that it had: they were not in its state, but in the ranks' own"
OPTIMIZERS: dict[str, OptimizerOf] = {"SGD": partial(SGD, lr=0.05, momentum=0.9), "AdamW": partial(AdamW, lr=0.02)}
of_both = pytest.mark.parametrize("kind", OPTIMIZERS)


def saved_by(spec: str, kind: str) -> tuple[dict[str, Any], Any]:
    """Train, and save the optimizer's state and the exchange's."""
    training = Training(spec, OPTIMIZERS[kind], ranks=2)
    training.train(4)
    return copy.deepcopy((training.optimizer.state_dict(), training.simulation.state_dict()))


def warned(training: Training, steps: int = 2) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        training.train(steps, 10)
    return caught


@of_both
def test_a_new_process_says_once_that_moments_are_missing(kind: str) -> None:
    optimizer, _ = saved_by(SPEC, kind)
    again = Training(SPEC, OPTIMIZERS[kind], ranks=2)
    again.optimizer.load_state_dict(optimizer)
    with pytest.warns(UserWarning, match=f"{kind} {MISSING}") as caught:
        again.train(3)
    assert len(caught) == 1 and caught[0].filename.endswith("training.py")
    assert not any("gradcomp" in group for group in again.optimizer.param_groups)


@of_both
def test_a_rollback_in_the_same_process_says_so(kind: str) -> None:
    training = Training(SPEC, OPTIMIZERS[kind], ranks=2)
    training.train(4)
    saved = copy.deepcopy(training.optimizer.state_dict())
    training.train(4, 4)
    training.optimizer.load_state_dict(saved)
    with pytest.warns(UserWarning, match=MISSING):
        training.train(1)


@pytest.mark.parametrize("ours_first", [True, False])
@of_both
def test_nothing_is_said_where_the_ranks_states_are_loaded(kind: str, ours_first: bool) -> None:
    optimizer, ours = saved_by(SPEC, kind)
    again = Training(SPEC, OPTIMIZERS[kind], ranks=2)
    loads = [lambda: again.simulation.load_state_dict(ours), lambda: again.optimizer.load_state_dict(optimizer)]
    for load in loads if ours_first else loads[::-1]:
        load()
    assert warned(again) == []


@of_both
def test_nothing_is_said_where_the_optimizer_had_its_moments_back(kind: str) -> None:
    training = Training(SPEC, OPTIMIZERS[kind], ranks=2)
    training.train(4)
    training.simulation.change(f"{SPEC},momentum=0")
    again = Training(SPEC, OPTIMIZERS[kind], ranks=2)
    again.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))
    assert warned(again) == []


@of_both
@pytest.mark.parametrize("steps", [0, 4])
def test_nothing_is_said_of_a_state_that_is_loaded_where_it_came_from(kind: str, steps: int) -> None:
    training = Training(SPEC, OPTIMIZERS[kind], ranks=2)
    training.train(steps)
    training.optimizer.load_state_dict(training.optimizer.state_dict())
    assert warned(training) == []


@of_both
def test_the_state_of_another_kind_of_optimizer_is_refused_by_a_sentence(kind: str) -> None:
    training = Training(SPEC, OPTIMIZERS[kind], ranks=2)
    training.optimizer.load_state_dict(saved_by(SPEC, "AdamW" if kind == "SGD" else "SGD")[0])
    with pytest.raises(RuntimeError, match=f"the groups of {kind} have no .*the state of another kind of optimizer was loaded"):
        training.train(1)
