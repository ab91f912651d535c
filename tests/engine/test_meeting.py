"""Agreement: records of the ranks' terms, and the error that names the term in which they differ."""

from __future__ import annotations

import re

import pytest

from gradcomp.engine import meeting

TERMS = {"spec": "topk", "seed": "0", "names": "a, b"}


def test_all_records_have_one_size() -> None:
    sizes = {meeting.record(TERMS | {"names": "x" * n}).numel() for n in (0, 1, 111, 112, 113, 100_000)}
    assert len(sizes) == 1


def test_ranks_that_agree_pass() -> None:
    meeting.check_terms(TERMS, [meeting.record(TERMS)] * 3)


@pytest.mark.parametrize("term", TERMS)
def test_ranks_that_differ_are_told_where(term: str) -> None:
    odd = TERMS | {term: "other"}
    for own in (TERMS, odd):  # every rank comes to the same sentence
        with pytest.raises(ValueError, match=re.escape(f"{term}: rank 0 has {TERMS[term]!r}, rank 2 has 'other'")):
            meeting.check_terms(own, [meeting.record(t) for t in (TERMS, TERMS, odd)])


def test_a_difference_beyond_the_shown_text_is_found() -> None:
    long = "x" * 500
    records = [meeting.record(TERMS | {"names": long + end}) for end in "ab"]
    with pytest.raises(ValueError, match=r"names: .*digest"):
        meeting.check_terms(TERMS, records)
