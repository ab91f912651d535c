"""The pages of the documentation: which there are, their blocks of code, and the records that they quote."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "benchmarks" / "results"
# All that a reader may open, and what of it a user reads.
USERS = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").rglob("*.md") if "decisions" not in path.parts)]
PAGES = [
    *USERS,
    *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "csrc/README.md", "csrc/wire.md")),
    *sorted((ROOT / "docs" / "decisions").glob("*.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
    *sorted((ROOT / "examples").glob("*.md")),
]


class Block(NamedTuple):
    """A block of code: its language, its text, and the line on which the text begins."""

    language: str
    text: str
    line: int


def name_of(page: Path) -> str:
    """Name a page by its path in the repository."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> Iterator[Block]:
    """List the blocks of a page. Those of a list may be indented."""
    text = page.read_text()
    for found in re.finditer(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL):
        lines = [line.removeprefix(found[1]) for line in found[3].splitlines()]
        yield Block(found[2], "\n".join(lines) + "\n", text.count("\n", 0, found.start(3)) + 1)


def anchors(page: Path) -> set[str]:
    """List the anchors of a page's headings, as GitHub and MkDocs both make them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {
        re.sub(r"[^\w -]", "", re.sub(r"\]\([^)]*\)", "", heading).lower()).strip().replace(" ", "-") for heading in headings
    }


def record(name: str) -> Any:
    """Read a record."""
    return json.loads((RECORDS / f"{name}.json").read_text())


def study(name: str) -> dict[str, Any]:
    """Return the lines of a study of one task, by their specs."""
    (task,) = record(f"study-{name}")["tasks"].values()
    return {line["spec"]: line for line in task["lines"]}
