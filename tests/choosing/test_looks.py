"""What a chooser sees after its choice: a link or a net that changes, and steps that only vary."""

from __future__ import annotations

from typing import Any

import choosing_ranks
import pytest
import torch
from choosing_ranks import CHOICE, FAST, SEEN, SLOW, Link, begun, train
from rank_clock import CLOCK

from gradcomp.choosing import chooser, links, looks
from gradcomp.choosing.chooser import Chooser

pytestmark = pytest.mark.usefixtures("model_time")


def test_a_faster_link_is_seen_at_one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then users would be slower than without gradcomp. A slower link is looked at twice: noise looks like it."""
    monkeypatch.setattr(chooser, "AGAIN", 10**6)
    looked, probe = [0], links.probe

    def counted(network: Any, device: torch.device, entries: int) -> float:
        looked[0] += network.world.rank == 0
        return probe(network, device, entries)

    monkeypatch.setattr(links, "probe", counted)
    link = Link(SLOW)
    ranks = begun(link, "low")
    before = train(ranks, CHOICE)[0]["choices"]
    while not looked[0]:
        train(ranks, 1)
    for each, probes in ((FAST, 1), (SLOW, 2 * looks.PROBES)):
        looked[0], link.each = 0, each
        while (said := train(ranks, 5)[0])["choices"] == before:
            assert looked[0] <= probes, said
        assert looked[0] in (probes, probes + looks.PROBES)
        before = said["choices"]
        while looked[0] < probes + looks.PROBES:
            train(ranks, 1)


def test_a_link_that_is_slow_for_a_moment_has_not_changed() -> None:
    """Other processes make a message take twice as long now and then. One of several in a row is as fast as before."""
    now = iter([1.0] * looks.PROBES + [3.0, 1.1, 3.0, 3.0, 3.0] * 2 + [3.0] * 2 * looks.PROBES)

    def probe() -> float:
        CLOCK.sleep(0.1)
        return next(now)

    seen = looks.Looks(probe, list, 2, 0)
    for odd in (False, False, False, True):
        assert not seen.changed
        seen.take([1.0], 100)
        assert seen.interval == pytest.approx(looks.NEXT_LOOK[0] if odd else 0.1 / looks.LOOKING, abs=1)
    seen.take([1.0], 100)
    assert seen.changed and seen.link_changed


def test_a_link_that_stays_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chooser, "AGAIN", 10**6)
    ranks = begun(Link(SLOW), "low")
    first = train(ranks, CHOICE)[0]
    later = train(ranks, 4 * SEEN)[0]
    assert (later["way"], later["after_step"], later["changes"]) == (first["way"], first["after_step"], first["changes"])


def test_many_equal_choices_do_not_make_it_blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often a choice has come out as before, a change is seen after some looks."""
    monkeypatch.setattr(chooser, "AGAIN", 1)
    link = Link(FAST)
    ranks = begun(link, "none")
    train(ranks, 6 * CHOICE)
    turns = ranks[0].session.turns
    assert isinstance(turns, Chooser) and turns.report()["choices"] > 4
    monkeypatch.setattr(chooser, "AGAIN", 10**6)
    link.each = SLOW
    said = train(ranks, chooser.MOST_LOOKS * 60 + CHOICE)[0]
    assert said["way"].startswith("half"), said


def test_a_net_that_computes_longer_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = begun(Link(FAST), "none")
    train(ranks, CHOICE)
    turns = ranks[0].session.turns
    assert isinstance(turns, Chooser)
    before = turns._work
    monkeypatch.setattr(choosing_ranks, "COMPUTES", 3 * choosing_ranks.COMPUTES)
    train(ranks, SEEN + CHOICE)
    after = turns._work
    assert before is not None and after is not None and after.forward > 2 * before.forward


def test_a_net_that_computes_longer_has_its_present_way_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although exact steps come first, and whatever its forecast."""
    ranks = begun(Link(SLOW), "low")
    assert train(ranks, CHOICE)[0]["way"].startswith("orq")
    turns = ranks[0].session.turns
    assert isinstance(turns, Chooser)
    present = turns._switch.way
    foresee = chooser.foresee

    def badly(*arguments: Any) -> Any:
        known, seconds = foresee(*arguments)
        return known, {way: each * (100 if way == present else 1) for way, each in seconds.items()}

    monkeypatch.setattr(chooser, "foresee", badly)
    monkeypatch.setattr(choosing_ranks, "COMPUTES", 3 * choosing_ranks.COMPUTES)
    said = train(ranks, SEEN + CHOICE)[0]
    assert said["choices"] == 2 and str(present) in said["seconds"], said


def test_steps_that_always_vary_are_not_chosen_for_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of short and of long sequences, for example. Choices would take a tenth of the time for ever."""
    monkeypatch.setattr(chooser, "AGAIN", 10**6)
    ranks = begun(Link(FAST), "none")
    train(ranks, 2 * CHOICE)
    usual = choosing_ranks.COMPUTES
    for at in range(20):
        monkeypatch.setattr(choosing_ranks, "COMPUTES", usual * (1 + at % 2))
        said = train(ranks, 40)[0]
    assert said["choices"] <= 4, said


def test_the_next_choice_comes_in_time_although_looks_are_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chooser, "AGAIN", 50)
    monkeypatch.setattr(looks, "NEXT_LOOK", (10, 1000))
    monkeypatch.setattr(looks, "LOOKING", 1e-6)
    ranks = begun(Link(FAST), "none")
    assert train(ranks, CHOICE + 50 + CHOICE)[0]["choices"] >= 2
