"""The tries of a choice: what is tried in any case, in which order, and what they may cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from gradcomp.choosing import account
from gradcomp.choosing.account import Account
from gradcomp.choosing.decision import best_of, shortlist
from gradcomp.choosing.tries import MOST, Tries
from gradcomp.choosing.ways import STOCK, Way

HALF, NINE, FIVE, TOPK = Way("half"), Way("orq:levels=9,momentum=0"), Way("orq:levels=5,momentum=0"), Way("topk")
CAST = Way("dense", torch.bfloat16)
EVERY = [STOCK, HALF, NINE, FIVE, TOPK]


class OneRank:
    """The switch of one rank. It takes every way but those that are out of reach."""

    def __init__(self, present: Way, out_of_reach: Sequence[Way] = ()):
        self.way, self._out_of_reach, self.order = present, out_of_reach, [present]

    def to(self, way: Way) -> Any:
        if way in self._out_of_reach:
            return False
        self.way = way
        self.order.append(way)
        return True
        yield

    def means(self, own: Sequence[float]) -> list[float]:
        return list(own)


class Ledger(Account):
    """An account in which each try costs so much beside its steps."""

    def __init__(self, before: float, each: float):
        super().__init__()
        self.usual, self._cost, self._each = 1.0, before, each

    def cost(self, step: float, since: tuple[float, int] | None = None) -> float:
        if since is not None:
            return self._each
        self._cost += self._each
        return self._cost


def tried(
    seconds: dict[Way, float], forecast: dict[Way, float], present: Way, account: Account, out_of_reach: Sequence[Way] = ()
) -> tuple[Tries, OneRank, int]:
    """Try the shortlist's ways, whose steps take so long. Return the steps, too."""
    switch: Any = OneRank(present, out_of_reach)
    tries = Tries(switch, account, forecast, {}, STOCK)
    every = [way for way in EVERY if way in forecast]
    course = tries.take(shortlist(every, forecast, present), present)
    steps = 0
    try:
        asked = next(course)
        while True:
            steps += asked
            for _ in range(asked):
                account.note_step(seconds[switch.way])
            account.begin_turn()
            asked = course.send([seconds[switch.way]] * asked)
    except StopIteration:
        return tries, switch, steps


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Let the first number be the seconds that turns are measured by."""
    now = [0.0]
    monkeypatch.setattr(account.time, "perf_counter", lambda: now[0])
    return now


def test_stock_and_the_present_way_are_tried_though_the_choice_was_dear_already() -> None:
    """Otherwise a way might be taken that is slower than both."""
    forecast = {HALF: 0.8, NINE: 0.85, STOCK: 1.0, FIVE: 0.9}
    tries, _, _ = tried({STOCK: 1.0, HALF: 1.5, NINE: 1.4, FIVE: 0.9}, forecast, FIVE, Ledger(8.0, 2.5))
    assert {STOCK, FIVE} <= {*tries.medians}
    assert best_of([STOCK, HALF, NINE, FIVE], tries.medians, FIVE)[0] == FIVE
    tries, switch, _ = tried({STOCK: 1.0, HALF: 1.5, TOPK: 0.5}, {HALF: 0.8, STOCK: 1.0, TOPK: 0.9}, TOPK, Ledger(30.0, 2.5))
    assert {STOCK, TOPK} == {*tries.medians} and switch.order[-1] == TOPK


def test_a_try_that_would_cost_too_much_is_not_begun() -> None:
    """A way with error feedback takes thirteen steps."""
    seconds, forecast = {STOCK: 1.0, TOPK: 0.2}, {STOCK: 1.0, TOPK: 1.25}
    assert TOPK in tried(seconds, forecast, STOCK, Ledger(MOST - 5, 0.0))[0].medians
    assert TOPK not in tried(seconds, forecast, STOCK, Ledger(MOST - 3, 0.0))[0].medians


def test_a_way_out_of_reach_costs_its_attempts() -> None:
    tries, _, _ = tried({STOCK: 1.0, HALF: 1.0}, {STOCK: 1.0, HALF: 0.9}, STOCK, Ledger(0.0, 1.0), [HALF])
    assert {*tries.medians} == {STOCK} and tries._cost == 5  # the beginning, stock three times, and half once


def test_a_large_gain_makes_no_change_dear(clock: list[float]) -> None:
    """Once a way is found to be five times as fast, all steps before it have cost more: but that is no cost of changes."""
    seconds = {STOCK: 1.0, CAST: 0.6, HALF: 0.2, NINE: 0.21, FIVE: 0.19, TOPK: 0.2}
    own = Account()
    own.usual = 1.0
    for _ in range(4):
        own.note_step(1.0)
    own.begin_turn()
    tries, _, _ = tried(seconds, dict(seconds), STOCK, own)
    assert {*tries.medians} == {*EVERY}
    assert tries._change == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("at", range(5))
def test_a_pause_before_anybody_knows_what_is_usual_is_not_the_choices(at: int, clock: list[float]) -> None:
    own = Account()
    for step in range(5):
        own.note_step(8.0 if step == at else 0.1)
    own.begin_turn()
    own.usual = 0.1
    assert own.cost(0.1) == pytest.approx(0.0)


def test_steps_of_a_slow_way_are_the_choices(clock: list[float]) -> None:
    own = Account()
    own.usual = 0.1
    for _ in range(4):
        own.note_step(0.4)
    own.begin_turn()
    assert own.cost(0.1) == pytest.approx(1.2)
    clock[0] += 0.05
    assert own.cost(0.1) == pytest.approx(1.25)  # the turn, too, from its beginning
    own.end_turn()
    own.note_step(0.15)
    own.begin_turn()
    assert own.cost(0.1) == pytest.approx(1.25)


def test_a_choice_that_begins_within_a_turn_counts_the_rest_of_it(clock: list[float]) -> None:
    """The second choice and all later ones begin so."""
    own = Account()
    own.begin_turn()
    clock[0] += 1.0
    own.open()
    own.usual = 0.1
    clock[0] += 8.0
    own.end_turn()
    own.note_step(8.1)
    own.begin_turn()
    assert own.cost(0.1) == pytest.approx(8.0)


def test_what_is_measured_in_a_turn_is_no_cost_of_the_tries_that_follow(clock: list[float]) -> None:
    """Links and kernels are measured in the turn in which the tries begin. No try would follow if that were the cost of one."""
    own = Account()
    own.usual = 0.1
    own.begin_turn()
    clock[0] += 3.0
    mark = own.mark
    own.end_turn()
    own.note_step(3.1)
    own.begin_turn()
    assert own.cost(0.1) == pytest.approx(3.0)
    assert own.cost(0.1, mark) == pytest.approx(0.0)
