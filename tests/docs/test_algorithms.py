"""The pages of the algorithms: a page, a row and a drawing for each, knobs as declared, drawings as they are."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest

import gradcomp
from documentation import drawings

PAGES = Path(__file__).resolve().parents[2] / "docs" / "algorithms"

SECTIONS = ["One step", "Knobs", "Results", "Limits"]

pytestmark = pytest.mark.usefixtures("one_thread")


def test_every_algorithm_has_a_page_a_row_and_a_drawing() -> None:
    index = (PAGES / "index.md").read_text()
    names = gradcomp.names()
    assert sorted(path.stem for path in PAGES.glob("*.md")) == sorted([*names, "index"])
    assert sorted(path.stem for path in PAGES.glob("*.svg")) == sorted(names) == sorted(drawings.DRAWINGS)
    for name in names:
        assert re.search(rf"^\| `{name}` \| \[.+\]\({name}\.md\) \| .+ \|$", index, re.MULTILINE), (
            f"index.md needs a row: {name}"
        )
        text = (PAGES / f"{name}.md").read_text()
        assert text.startswith(f"# {name}\n")
        assert re.search(rf"^!\[.+\]\({name}\.svg\)$", text, re.MULTILINE), f"{name}.md shows no drawing"
        headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
        assert headings == SECTIONS and "**Use it** " in text, name


@pytest.mark.parametrize("name", gradcomp.names())
def test_a_pages_knobs_are_the_declarations(name: str) -> None:
    text = (PAGES / f"{name}.md").read_text()
    assert text == knobs()["page"](name, text), "run: scripts/knobs --pages"


@pytest.mark.parametrize("name", drawings.DRAWINGS)
def test_a_drawing_shows_what_the_compressor_does(name: str) -> None:
    """Words and numbers are compared: learned floats differ with the processor."""
    kept = (PAGES / f"{name}.svg").read_text()
    assert words(kept) == words(drawings.draw(name)), f"run: scripts/drawings {name}"
    assert not re.search(r'<script|href="[^#]', kept), "a drawing needs nothing else"


def knobs() -> dict[str, object]:
    return runpy.run_path(str(PAGES.parents[1] / "scripts" / "knobs"))


def words(svg: str) -> list[str]:
    return [text for each in ElementTree.fromstring(svg).iter() if (text := (each.text or "").strip())]
