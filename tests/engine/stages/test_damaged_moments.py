"""Saved moments and counts that no training can have: each is refused by name, and nothing is loaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch.optim import AdamW
from training import Training

State = dict[str, Any]


def trained() -> Training:
    return Training("topk:ratio=0.2", partial(AdamW, lr=0.01), ranks=2).train(3)


def adam(state: State) -> dict[str, dict[str, Any]]:
    layers: dict[str, dict[str, Any]] = state["of_rank"]["1"]["layers"]["adam"]
    return layers


def make_negative(state: State) -> None:
    adam(state)["second"]["0.weight"][3] = -1e-9


def forget_moments(state: State) -> None:
    del adam(state)["first"], adam(state)["second"]


def forget_steps(state: State) -> None:
    del adam(state)["steps"]["1.bias"]


def count_too_many(state: State) -> None:
    adam(state)["steps"]["0.bias"] = 10**18


def be_older_than_any(state: State) -> None:
    for share in state["of_rank"].values():
        share["steps"] = 2**63 - 2


def count_a_buckets_too_many(state: State) -> None:
    state["of_rank"]["0"]["buckets"][0]["steps"] = 2**63


def sum_on_one_rank(state: State) -> None:
    state["of_rank"]["1"]["sums"] = True


def sum_by_word(state: State) -> None:
    for share in state["of_rank"].values():
        share["sums"] = "yes"


def name_by_list(state: State) -> None:
    state["of_rank"]["1"]["buckets"][0]["layers"][0] = ["0.weight"]


@pytest.mark.parametrize(
    "damage, sentence",
    [
        (make_negative, r"Adam's second moment of '0\.weight' is negative in the state"),
        (forget_moments, r"only Adam's moments, or only the count of steps, of '0\.bias'"),
        (forget_steps, r"only Adam's moments, or only the count of steps, of '1\.bias'"),
        (count_too_many, r"0\.bias=10{18} in the state must be a whole number of at least 0 and at most 9007199254740992"),
        (be_older_than_any, r"steps=9223372036854775806 in the state must be .* at most"),
        (count_a_buckets_too_many, r"steps=9223372036854775808 in the state must be .* at most"),
        (sum_on_one_rank, r"sums must be True, or False, of all ranks in the state, and is False of rank 0, True of rank 1"),
        (sum_by_word, r"sums must be True, or False.*'yes' of rank 0"),
        (name_by_list, r"layers has \['0\.weight'\] in the state, which is no name"),
    ],
)
def test_damage_is_refused_by_name(damage: Callable[[State], None], sentence: str) -> None:
    state = trained().simulation.state_dict()
    damage(state)
    again = trained()
    before = again.simulation.residual(1)
    with pytest.raises(ValueError, match=sentence):
        again.simulation.load_state_dict(state)
    assert all(bool((each == before[name]).all()) for name, each in again.simulation.residual(1).items())
