"""The page of results holds the charts and tables of the committed records."""

from __future__ import annotations

import re

import pytest

from documentation import results

PAGE = results.PAGE.read_text()


def test_the_page_has_the_tables_of_the_records() -> None:
    assert results.written(PAGE) == PAGE, "run PYTHONPATH=scripts python -m documentation.results"


@pytest.mark.parametrize("name", ["scores", "steps", "seconds"])
def test_a_chart_is_that_of_the_records(name: str) -> None:
    made = dict(results.charts())
    assert (results.CHARTS / f"{name}.svg").read_text() == made[name], "run PYTHONPATH=scripts python -m documentation.results"
    assert f"](charts/{name}.svg)" in PAGE and len(made) == 3
    assert "prefers-color-scheme: dark" in made[name] and not re.search(r'<script|href="', made[name])


def test_a_chart_shows_what_loses() -> None:
    """A difference to dense that is large has a row, and so has a way that needs longer than stock."""
    made = dict(results.charts())
    assert "6.97 (\N{LESS-THAN OR EQUAL TO} 8.99)" in made["scores"]
    last = made["seconds"][made["seconds"].rindex(">4 hosts, 10 Gbit/s<") :]
    stock, levels = (int(re.findall(rf">{name}<.*?>(\d+)[ <]", last, re.DOTALL)[0]) for name in ("stock", "orq, 9 levels"))
    assert stock < levels
    left = [float(x) for x in re.findall(r'<(?:rect|line)[^>]* x1?="([\d.]+)"', "".join(made.values()))]
    assert min(left) >= 0 and max(left) <= 400
