"""The chooser's course on links that take time: it finds the fastest way, keeps to it, and chooses again on another link."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from itertools import pairwise
from typing import Any

import choosing_ranks
import pytest
import threads
import torch
from choosing_ranks import CHOICE, FAST, SEEN, SLOW, Link, begun, train
from rank_clock import CLOCK
from threads import Rank

from gradcomp.choosing import chooser, ways
from gradcomp.choosing import forecast as forecasts
from gradcomp.choosing.chooser import Chooser
from gradcomp.choosing.forecast import Forecast

pytestmark = pytest.mark.usefixtures("model_time")


@pytest.mark.parametrize("loss", ["none", "low"])
def test_a_slow_link_gets_fewer_bytes_and_a_fast_one_stays_stock(loss: str) -> None:
    link = Link(SLOW)
    ranks = begun(link, loss)
    slow = train(ranks, CHOICE)[0]
    assert slow["way"].startswith("half" if loss == "none" else "orq"), slow
    assert slow["seconds"].get(slow["way"], math.inf) < 0.8 * slow["exact"], slow  # unless the next choice is under way
    link.each = FAST
    fast = train(ranks, SEEN + CHOICE)[0]
    assert fast["way"] == "stock" and fast["after_step"] > slow["after_step"], fast
    link.each = SLOW
    assert train(ranks, SEEN + CHOICE)[0]["way"].startswith("half" if loss == "none" else "orq")
    assert torch.equal(ranks[0].came, ranks[1].came)


def test_a_choice_that_noise_made_is_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chooser, "AGAIN", 120)
    right = chooser.best_of
    monkeypatch.setattr(chooser, "best_of", lambda every, seconds, present: (ways.STOCK, "noise"))
    ranks = begun(Link(SLOW), "low")
    assert train(ranks, CHOICE)[0]["way"] == "stock"
    monkeypatch.setattr(chooser, "best_of", right)
    assert train(ranks, 120 + CHOICE)[0]["way"].startswith("orq")


@pytest.mark.parametrize("loss", ["low", "high"])
def test_choosing_costs_few_steps(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most twenty of stock's: measuring, changes, and what the steps of slower ways took longer."""
    try_part, tried = Forecast._try_part, [0]

    def slow(self: Forecast, *arguments: Any) -> Any:
        tried[0] += 1
        CLOCK.sleep(choosing_ranks.COMPUTES)
        return try_part(self, *arguments)

    monkeypatch.setattr(Forecast, "_try_part", slow)
    monkeypatch.setattr(chooser, "AGAIN", 30)
    for each in (SLOW, FAST):
        ranks = begun(Link(each), loss)
        first = train(ranks, CHOICE)[0]
        assert 2 < first["cost_in_steps"] <= 20 and tried[0] >= 6, first
        assert 2 < train(ranks, 30 + CHOICE)[0]["cost_in_steps"] <= 20


def test_kernels_that_something_slowed_down_are_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a way would never be tried again, for the pause of a moment."""
    spoiled, try_out = [True], forecasts.try_out

    def slow(spec: str, *arguments: Any) -> Any:
        buckets = try_out(spec, *arguments)
        if not (spoiled[0] and spec.startswith("orq")):
            return buckets
        return [each._replace(parts=tuple(part._replace(seconds=1.0) for part in each.parts)) for each in buckets]

    monkeypatch.setattr(forecasts, "try_out", slow)
    monkeypatch.setattr(chooser, "AGAIN", 40)
    monkeypatch.setattr(chooser, "TIMING_AGAIN", 1000)
    ranks = begun(Link(SLOW), "low")
    assert train(ranks, CHOICE)[0]["way"] == "half"
    spoiled[0] = False
    assert train(ranks, 40 + CHOICE)[0]["way"].startswith("orq")


def test_each_choice_that_comes_out_as_before_makes_the_next_one_rarer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chooser, "AGAIN", 50)
    ranks = begun(Link(FAST), "none")
    after = [train(ranks, CHOICE)[0]["after_step"]]
    while len(after) < 4:
        step = train(ranks, 1)[0]["after_step"]
        after += [step] if step != after[-1] else []
    gaps = [later - earlier for earlier, later in pairwise(after)]
    assert [later - earlier for earlier, later in pairwise(gaps)] == [pytest.approx(50, abs=5), pytest.approx(100, abs=5)]


def test_rank_0_logs_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="gradcomp")
    said = train(begun(Link(SLOW), "none"), CHOICE)[0]
    assert [text for text in caplog.messages if "auto goes on with" in text] == [
        f"gradcomp: auto goes on with {said['way']} after step {said['after_step']}: {said['reason']}"
    ]


def test_where_exact_steps_take_long_stock_is_not_tried() -> None:
    said = train(begun(Link(4 * SLOW), "low"), CHOICE)[0]
    assert said["way"].startswith("orq") and "stock" in said["forecast"] and "stock" not in said["seconds"], said


def test_pauses_are_no_part_of_the_cost() -> None:
    """A validation after every ninth step, for example."""
    ranks = begun(Link(SLOW), "low")

    def of_rank(rank: Rank) -> dict[str, Any]:
        with CLOCK.of(rank):
            for step in range(CHOICE):
                CLOCK.sleep(choosing_ranks.COMPUTES + (0 if step % 9 else 40 * choosing_ranks.COMPUTES))
                rank.step()
        turns = rank.session.turns
        assert isinstance(turns, Chooser)
        return turns.report()

    said = threads.together(ranks, of_rank)[0]
    assert said["way"].startswith("orq") and said["cost_in_steps"] <= 20, said


def test_slow_meetings_are_part_of_the_cost_and_end_the_tries() -> None:
    """A change of the compressor is a meeting of some steps' length."""
    ranks, meetings = begun(Link(FAST), "low"), Counter[Rank]()

    def meet(rank: Rank) -> None:
        meetings[rank] += 1
        CLOCK.sleep(4 * choosing_ranks.COMPUTES)

    for rank in ranks:
        rank.network.prepare = partial(meet, rank)  # type: ignore[method-assign]
    said = train(ranks, CHOICE)[0]
    spent = ranks[0].seconds / said["seconds"]["stock"] - CHOICE
    assert 2 < meetings[ranks[0]] <= said["changes"] + 1
    assert 3 * (meetings[ranks[0]] - 1) < said["cost_in_steps"] <= min(20, spent + 3), (said, spent)


@pytest.mark.parametrize("hosts", [["a", "a", "b"], ["a", "a", "b", "b"], ["a", "a"]], ids="-".join)
def test_ways_between_hosts_need_as_many_ranks_on_each(hosts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chooser, "TIMING", 1000)
    said = train(begun(Link(SLOW), "low", hosts), CHOICE)[0]
    offered = any("by_host" in way for way in said["forecast"])
    assert offered == (hosts == ["a", "a", "b", "b"]) and not said["refused"]
    assert ("near" in said["links"]) == offered


def test_ways_whose_kernels_there_was_no_time_for_come_in_the_next_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chooser, "TIMING", 0)
    monkeypatch.setattr(chooser, "AGAIN", 40)
    ranks = begun(Link(SLOW), "low")
    first = train(ranks, CHOICE)[0]
    assert first["way"] == "stock" and {*first["forecast"]} <= {"stock", "dense"}, first  # dense is the way of the first steps
    monkeypatch.setattr(chooser, "TIMING", 1000)
    second = train(ranks, 40 + CHOICE)[0]
    assert second["way"].startswith("orq") and {*second["forecast"]} > {*first["forecast"]}


def test_after_a_change_of_ranks_all_is_measured_anew() -> None:
    ranks = begun(Link(SLOW), "low")
    before = train(ranks, CHOICE)[0]
    turns = ranks[0].session.turns
    assert isinstance(turns, Chooser) and turns._forecast is not None and turns._forecast.world.size == 2
    left = ranks[:1] + begun(Link(SLOW), "low") + ranks[1:]
    threads.move(left)
    after = train(left, CHOICE)[0]
    assert turns._forecast.world.size == 4
    assert after["choices"] == 1 and after["after_step"] > before["after_step"]


def test_after_a_change_of_ranks_stock_waits_for_the_meeting() -> None:
    """Otherwise the old ranks would hand Horovod gradients, and the new one would wait for them in the meeting."""
    ranks = begun(Link(FAST), "none")
    assert train(ranks, CHOICE)[0]["way"] == "stock" and ranks[0].session.stock is not None
    assert torch.equal(ranks[0].came, ranks[1].came)
    threads.move(ranks)
    assert not any(rank.session.has_met or rank.session.stock for rank in ranks)


def test_what_stock_sends_of_an_exact_exchange() -> None:
    """Gradients of 16 bits travel as such by stock, and as float32 by an exact exchange."""
    ranks = begun(Link(FAST), "none")
    turns = ranks[0].session.turns
    assert isinstance(turns, Chooser)
    assert (turns._part_of(torch.float32), turns._part_of(torch.bfloat16)) == (1, 0.5)
    ranks[0].parameter.data = ranks[0].parameter.data.bfloat16()
    assert turns._part_of(torch.float32) == turns._part_of(torch.bfloat16) == 0.5


def test_without_an_optimizer_high_says_what_it_lacks() -> None:
    for loss in ("low", "high"):
        turns = begun(Link(FAST), loss)[0].session.turns
        assert isinstance(turns, Chooser)
        assert any("optimizer=" in why for why in turns.report()["refused"].values()) == (loss == "high")
