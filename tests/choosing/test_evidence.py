"""The evidence: a way is as fast as all choices on a link together show it."""

from __future__ import annotations

import pytest

from gradcomp.choosing.decision import best_of
from gradcomp.choosing.evidence import CHOICES, Evidence
from gradcomp.choosing.ways import STOCK, Way

NINE, FIVE = Way("orq:levels=9,momentum=0"), Way("orq:levels=5,momentum=0")


def test_a_way_that_was_faster_by_chance_is_left_at_the_next_choice() -> None:
    evidence, every = Evidence(STOCK), [STOCK, NINE, FIVE]
    first = evidence.joined({STOCK: 1.0, FIVE: 0.94})
    assert best_of(every, first, STOCK)[0] == FIVE
    alone = {STOCK: 2.0, FIVE: 2.2, NINE: 2.4}
    joined = evidence.joined(alone)
    assert joined == {STOCK: 2.0, FIVE: pytest.approx(2.0 * (0.94 * 1.1) ** 0.5), NINE: pytest.approx(2.4)}
    assert best_of(every, joined, FIVE)[0] == STOCK


def test_a_changed_link_is_other_evidence() -> None:
    evidence = Evidence(STOCK)
    evidence.joined({STOCK: 1.0, FIVE: 0.2})
    evidence.forget()
    assert evidence.joined({STOCK: 1.0, FIVE: 1.2}) == {STOCK: 1.0, FIVE: pytest.approx(1.2)}


def test_what_has_changed_little_by_little_counts_after_some_choices() -> None:
    evidence = Evidence(STOCK)
    for _ in range(9):
        evidence.joined({STOCK: 1.0, FIVE: 1.05})
    joined = [evidence.joined({STOCK: 1.0, FIVE: 0.8})[FIVE] for _ in range(CHOICES)]
    assert joined[-1] == pytest.approx(0.8)


def test_without_the_unit_a_choice_stands_alone() -> None:
    """Stock is not tried where an exact step has shown that it cannot be fast."""
    evidence = Evidence(STOCK)
    assert evidence.joined({NINE: 0.3, FIVE: 0.2}) == {NINE: 0.3, FIVE: 0.2}
