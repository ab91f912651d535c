"""The charts of the documentation are those of the committed records."""

from __future__ import annotations

import re

import pytest
from documents import ROOT

from documentation.pictures import CHARTS, DRAWN


@pytest.mark.parametrize("name", DRAWN)
def test_a_chart_is_that_of_the_records(name: str) -> None:
    made = DRAWN[name]()
    assert (CHARTS / f"{name}.svg").read_text() == made, "run PYTHONPATH=scripts python -m documentation.pictures"
    assert "prefers-color-scheme: dark" in made and not re.search(r'<script|href="', made)
    page = {"local-steps": "local-steps.md", "queue": "algorithms/topk.md"}.get(name, "results.md")
    assert re.search(rf"\]\((\.\./)?charts/{name}\.svg\)", (ROOT / "docs" / page).read_text())


def test_a_chart_shows_what_loses() -> None:
    """A difference to dense that is large has a row, and so has a way that needs longer than stock."""
    made = {name: DRAWN[name]() for name in ("scores", "steps")}
    assert "0.81 (\N{LESS-THAN OR EQUAL TO} 1.42)" in made["scores"]
    last = made["steps"][made["steps"].rindex(">4 hosts, 10 Gbit/s<") :]
    stock, levels = (int(re.findall(rf">{name}<.*?>(\d+)[ <]", last, re.DOTALL)[0]) for name in ("stock", "orq, 9 levels"))
    assert stock < levels
    left = [float(x) for x in re.findall(r'<(?:rect|line)[^>]* x1?="([\d.]+)"', "".join(made.values()))]
    assert min(left) >= 0 and max(left) <= 400
