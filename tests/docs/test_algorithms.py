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
    shared = knobs()["SHARED"]
    assert {path.stem for path in PAGES.glob("*.md")} == {"index", *(shared.get(name, name) for name in names)}
    assert sorted(path.stem for path in PAGES.glob("*.svg")) == sorted(names) == sorted(drawings.DRAWINGS)
    for name in names:
        page = f"{shared.get(name, name)}.md" + (f"#{name}" if name in shared else "")
        assert re.search(rf"^\| `{name}` \| \[.+\]\({page}\) \| .+ \|$", index, re.MULTILINE), f"index.md needs a row: {name}"
        text = (PAGES / page.partition("#")[0]).read_text()
        if name in shared:
            text = text.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        else:
            headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
            assert text.startswith(f"# {name}\n") and headings == SECTIONS
        assert re.search(rf"^!\[.+\]\({name}\.svg\)$", text, re.MULTILINE), f"{name} shows no drawing"
        assert "**Use it** " in text, name


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
