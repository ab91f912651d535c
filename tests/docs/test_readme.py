"""README is short, and names what a newcomer needs first."""

from __future__ import annotations

from documents import ROOT


def test_readme_has_at_most_100_lines() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 100
    assert max(len(line) for line in lines if not line.startswith(("|", "!"))) <= 128


def test_installing_comes_before_its_use() -> None:
    text = (ROOT / "README.md").read_text()
    places = [text.index(heading) for heading in ("## Install", "## Use it", "## Which spec?", "## Limits")]
    assert places == sorted(places)
