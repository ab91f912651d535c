"""From one way to another: no gradient is lost, and none comes twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import threads
import torch
from threads import Rank

from gradcomp.choosing.switch import PATIENCE, Switch
from gradcomp.choosing.ways import FIRST, SENDS_ALL, STOCK, Way
from gradcomp.core.requests import Reduce

HALF, LEVELS, TOPK, GTOPK = Way("half:form=fp16"), Way("orq:levels=9"), Way("topk:ratio=0.05"), Way("gtopk:ratio=0.05")


class Scripted:
    """Turns that take one way after the other, for some steps each."""

    def __init__(self, rank: Rank, ways: list[Way], steps: int, present: Way = FIRST):
        self.switch, self._ways, self._steps = Switch(rank.session), ways, steps
        self.switch.begin_anew(present)
        self.taken: list[bool] = []
        self._course = self._run()
        self._left = next(self._course)

    def _run(self) -> Iterator[Any]:
        for way in self._ways:
            taken = yield from self.switch.to(way)  # type: ignore[misc]
            self.taken.append(taken)
            yield self._steps
        while True:
            yield 10**6

    @property
    def due(self) -> bool:
        return self._left <= 0

    def take(self) -> None:
        self._left = self._course.send([])  # type: ignore[attr-defined]

    def note_step(self) -> None:
        self._left -= 1


def by_stock(rank: Rank) -> None:
    """Let the rank's network take the part of stock Horovod."""

    def mean(slot: Any) -> None:
        grad = rank.parameter.grad
        assert grad is not None
        grad.copy_(rank.network.start(Reduce(grad.clone(), 0.5), "stock")())

    rank.session.by_stock = mean


@pytest.mark.parametrize(
    "ways",
    [[TOPK, STOCK], [STOCK, TOPK, GTOPK, HALF], [HALF, STOCK, TOPK, Way("dense")], [TOPK, TOPK, STOCK]],
    ids=lambda ways: ", ".join(map(str, ways)),
)
def test_what_was_given_is_what_came_and_what_waits(ways: list[Way]) -> None:
    ranks = threads.start(2, "dense")

    def train(rank: Rank) -> Scripted:
        by_stock(rank)
        rank.step()
        turns = Scripted(rank, ways, 5)
        rank.session.turns = turns
        for _ in range(5 * len(ways) + 8):
            rank.step()
        return turns

    turns = threads.together(ranks, train)
    for each in turns:
        assert isinstance(each, Scripted), each
        assert each.taken == [True] * len(ways) and each.switch.way == ways[-1]
    given = (ranks[0].given + ranks[1].given) / 2
    waits = (ranks[0].residual.double() + ranks[1].residual.double()) / 2
    torch.testing.assert_close(ranks[0].came + waits, given, atol=2e-2 if HALF in ways else 1e-4, rtol=0)
    assert torch.equal(ranks[0].came, ranks[1].came)
    if not ways[-1].keeps:
        assert not waits.any()
    assert all(rank.session.stock == ways[-1].stock for rank in ranks)


def test_a_way_that_does_not_suit_the_training_is_refused_once_on_all_ranks() -> None:
    ranks = threads.start(2, "dense")
    odd = Way("topk:momentum=0.9,lr_momentum=1")  # no such knob

    def train(rank: Rank) -> Scripted:
        rank.step()
        turns = Scripted(rank, [odd, LEVELS, odd], 2)
        rank.session.turns = turns
        for _ in range(8):
            rank.step()
        return turns

    for each in threads.together(ranks, train):
        assert each.taken == [False, True, False]
        assert each.switch.way == LEVELS and each.switch.changes == 1


def test_what_cannot_be_sent_is_found_out_once_in_a_choice() -> None:
    """Each attempt takes some exact steps."""
    ranks = threads.start(2, "dense")

    def train(rank: Rank) -> tuple[list[bool], int]:
        by_stock(rank)
        rank.step()
        turns = Scripted(rank, [TOPK, STOCK, HALF, LEVELS, GTOPK], 2)
        rank.session.turns = turns
        exact = 0
        for step in range(20):
            rank.parameter.requires_grad_(step < 2)
            if step < 2:
                rank.step()
            else:
                rank.session.begin()
                rank.session.finish_step()
            exact += turns.switch.way == SENDS_ALL
        return turns.taken, exact

    for taken, exact in threads.together(ranks, train):
        assert taken == [True, False, False, False, True]
        assert exact <= PATIENCE + 3 * 2 + 1  # the script itself waits for two steps after each way


def test_what_waits_of_a_frozen_layer_keeps_a_way_without_a_residual_away() -> None:
    """It would be lost. Once the layer trains again, the way is open."""
    ranks = threads.start(2, "dense")

    def train(rank: Rank) -> tuple[list[bool], int]:
        by_stock(rank)
        rank.step()
        taken: list[bool] = []
        changes, way = 0, Way("dense")
        for wanted, frozen in ((TOPK, False), (STOCK, True), (STOCK, True), (STOCK, False)):
            rank.parameter.requires_grad_(not frozen)
            turns = Scripted(rank, [wanted], 3, way)
            rank.session.turns = turns
            for _ in range(PATIENCE + 3):
                if frozen:
                    rank.session.begin()
                    rank.session.finish_step()
                else:
                    rank.step()
            taken, changes, way = taken + turns.taken, changes + turns.switch.changes, turns.switch.way
        return taken, changes

    for each in threads.together(ranks, train):
        assert each == ([True, False, False, True], 3), each  # topk, what sends all, and stock
    given = (ranks[0].given + ranks[1].given) / 2
    torch.testing.assert_close(ranks[0].came, given, atol=1e-4, rtol=0)
