"""Ranks that have parted say where they are, in place of a message that never comes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from replicas import Replica, Replicas
from torch.optim import SGD
from training import draw

from gradcomp.engine.updates.agreement import SPOILT_BEFORE_WARNING

SPEC = "topk:ratio=0.1"
sgd = partial(SGD, lr=0.1)


def outcomes(ours: Replicas, call: Any) -> list[str]:
    def caught(rank: Replica) -> str:
        try:
            call(rank)
        except RuntimeError as error:
            return str(error)
        return ""

    return ours.each(caught)


def test_a_rank_that_leaves_a_step_out_is_named_on_all() -> None:
    ours = Replicas(SPEC, sgd, ranks=3).train(4)
    grads = draw(4, ranks=3)
    ours.exchange(grads)
    before = [each.detach().clone() for rank in ours.ranks for each in rank.weights.values()]

    def act(rank: Replica) -> None:
        if rank is not ours.ranks[1]:
            rank.step()
        rank.backward(grads[0])

    for text in outcomes(ours, act):
        assert text.startswith(
            "the ranks are out of step: rank 0 is in step 5 and rank 1 is in a backward pass after 4 exch"
        ), text
        assert "blocks" in text
    now = [each.detach() for rank in ours.ranks for each in rank.weights.values()]
    assert all(map(torch.equal, now, before)), "a step that the others do not take is none"


def test_passes_that_are_never_finite_are_told_of_once() -> None:
    """As where a layer that no optimizer trains keeps the infinity of an overflow in its gradient."""
    ours, spoilt = Replicas(SPEC, sgd, ranks=2), draw(0, ranks=2)
    spoilt[1]["0.bias"].fill_(torch.inf)
    for _ in range(SPOILT_BEFORE_WARNING - 1):
        ours.exchange(spoilt)
    ours.exchange(draw(1, ranks=2))
    for _ in range(SPOILT_BEFORE_WARNING - 1):
        ours.exchange(spoilt)
    with pytest.warns(UserWarning, match="of 20 backward passes in a row were not finite on some rank"):
        ours.exchange(spoilt)
    for _ in range(SPOILT_BEFORE_WARNING + 1):
        ours.exchange(spoilt)


def test_ranks_that_step_optimizers_in_other_orders_are_named() -> None:
    def two(weights: Any) -> list[SGD]:
        first, *rest = weights
        return [SGD([first], lr=0.1), SGD(rest, lr=0.1)]

    ours = Replicas(SPEC, two, ranks=2).train(3)
    ours.exchange(draw(3, ranks=2))
    turned = ours.ranks[1]
    found = outcomes(ours, lambda rank: [rank.step(each) for each in rank.optimizers[:: -1 if rank is turned else 1]])
    for text in found:
        assert (
            "the ranks are out of step: rank 0 is in step 7 of the optimizer of" in text
            and "1 is in step 7 of the optimizer of" in text
        )


def test_ranks_that_first_step_alike_optimizers_in_other_orders_are_named() -> None:
    """Their messages are of one size: each layer would get the other one's update."""
    shapes = {"a": (4, 3), "b": (4, 3)}
    ours = Replicas(SPEC, lambda weights: [SGD([each], lr=0.1) for each in weights], shapes, 2)
    ours.exchange(draw(0, shapes, 2))
    turned = ours.ranks[1]
    found = outcomes(ours, lambda rank: [rank.step(each) for each in rank.optimizers[:: -1 if rank is turned else 1]])
    first, second = "rank 0 is in step 1 of the optimizer of 'a'", "rank 1 is in step 1 of the optimizer of 'b'"
    assert f"{first} and rank 1 is in step 1 of another optimizer. " in found[0]
    assert f"rank 0 is in step 1 of another optimizer and {second}. " in found[1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_that_agree_pass_also_where_all_leave_a_step_out(ranks: int) -> None:
    ours = Replicas(SPEC, sgd, ranks=ranks).train(2)
    ours.exchange(draw(2, ranks=ranks))
    ours.exchange(draw(3, ranks=ranks))
    ours.train(2, 4)
