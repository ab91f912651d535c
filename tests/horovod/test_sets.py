"""Process sets, and every kind of request over real Horovod, on three ranks."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch

pytestmark = pytest.mark.slow

KINDS = ["swap", "spread", "ring", "collect", "everybody", "nobody", "gather", "total", "mean"]
both_routes = pytest.mark.parametrize("route", ["A", "B"])


@ranks.once
def found() -> list[dict[Any, Any]]:
    return ranks.launch("horovod_sets", 3)


@both_routes
@pytest.mark.parametrize("spec", ["dense", "topk:ratio=1,wire=exact"])
def test_within_a_set_training_is_horovods_own(spec: str, route: str) -> None:
    """Two members: a sum of two has one order."""
    for rank in (0, 2):
        own = found()[rank]
        assert torch.equal(own["members", route, spec], own["members", "hvd", spec])


@both_routes
def test_the_members_of_a_set_hold_the_same_weights(route: str) -> None:
    key = ("members", route, "topk:ratio=0.01")
    assert torch.equal(found()[0][key], found()[2][key])
    assert key not in found()[1]


@both_routes
def test_all_ranks_train_together_after_some_did(route: str) -> None:
    """Names of operations must not depend on what a rank did in a set that others are not in."""
    first, *others = (rank["all", route] for rank in found())
    assert all(torch.equal(first, other) for other in others)


@both_routes
def test_a_rank_outside_the_set_trains_by_itself(route: str) -> None:
    first, outside, second = (rank["everywhere", route] for rank in found())
    assert torch.equal(first, second)
    assert not torch.equal(first, outside)


@pytest.mark.parametrize("kind", KINDS)
def test_horovod_answers_as_the_simulator_does(kind: str) -> None:
    """Byte for byte, also to a rank that sends nothing; sums of small whole numbers are exact."""
    for rank in found():
        for came, expected in rank["exchange", kind]:
            assert came == expected


def test_a_sender_that_says_nothing_is_found_out() -> None:
    first, *others = (rank["unheard"] for rank in found())
    assert (
        "exchange unheard: payloads were expected from ranks [1], but came from []; check that all ranks are at the same"
        in first
    )
    assert others == ["nothing was raised"] * 2
