"""The pages of the algorithms: a page, a row and a drawing for each, knobs as declared, drawings as they are."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest

import gradcomp
from laboratory.drawings.canvas import WIDTH
from laboratory.drawings.gallery import DRAWINGS

PAGES = Path(__file__).resolve().parents[2] / "docs" / "algorithms"

SVG = "{http://www.w3.org/2000/svg}"

# The drawing that shows floats which have been learned: another processor may round them differently.
LEARNED = "lgc"

SECTIONS = ["One step", "Knobs", "Bytes a step", "What is ours", "Results"]

pytestmark = pytest.mark.usefixtures("one_thread")


def test_every_algorithm_has_a_page_a_row_and_a_drawing() -> None:
    index = (PAGES / "index.md").read_text()
    names = gradcomp.names()
    assert sorted(path.stem for path in PAGES.glob("*.md")) == sorted([*names, "index"])
    assert sorted(path.stem for path in PAGES.glob("*.svg")) == sorted([*names, "routes"]) == sorted(DRAWINGS)
    for name in names:
        assert re.search(rf"^\| `{name}` \| \[.+\]\({name}\.md\) \| .+ \|$", index, re.MULTILINE), (
            f"index.md needs a row: {name}"
        )
        text = (PAGES / f"{name}.md").read_text()
        assert text.startswith(f"# {name}\n")
        assert re.search(rf"^!\[.+\]\({name}\.svg\)$", text, re.MULTILINE), f"{name}.md shows no drawing"
        headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
        assert headings[1:] == SECTIONS and headings[0] in ("Paper", "Paper and equation"), name


@pytest.mark.parametrize("name", gradcomp.names())
def test_a_pages_knobs_are_the_declarations(name: str) -> None:
    text = (PAGES / f"{name}.md").read_text()
    assert text == knobs()["page"](name, text), "run: scripts/knobs --pages"


def test_a_page_without_a_place_for_its_knobs_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"docs/algorithms/topk\.md must have one line"):
        knobs()["page"]("topk", "# topk\n")


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_drawing_shows_what_the_compressor_does(name: str) -> None:
    kept, drawn = (PAGES / f"{name}.svg").read_text(), DRAWINGS[name]()
    if name == LEARNED:
        assert shape(kept) == shape(drawn), f"run: scripts/drawings {name}"
        assert numbers(kept) == pytest.approx(numbers(drawn), abs=1), "a unit is less than a bar's width"
    else:
        assert kept == drawn, f"run: scripts/drawings {name}"


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_drawing_needs_nothing_else_and_its_words_stay_on_the_card(name: str) -> None:
    """Without scripts, fonts or pictures of elsewhere. A letter is taken to be 0.58 of its height wide, more than in Roboto."""
    card = ElementTree.parse(PAGES / f"{name}.svg").getroot()
    assert not re.search(r"href|url\(|<script|<style", (PAGES / f"{name}.svg").read_text())
    for line in card.iter(f"{SVG}text"):
        words, size, x = line.text or "", float(line.attrib["font-size"]), float(line.attrib["x"])
        if line.get("text-anchor") != "middle":
            assert size >= 9 and x + 0.58 * size * len(words) < WIDTH, words


def knobs() -> dict[str, object]:
    return runpy.run_path(str(PAGES.parents[1] / "scripts" / "knobs"))


def shape(svg: str) -> str:
    """Leave the numbers of attributes out."""
    return re.sub(r'="[-\d.]+"', "", svg)


def numbers(svg: str) -> list[float]:
    return [float(number) for number in re.findall(r'="(-?[\d.]+)"', svg)]
