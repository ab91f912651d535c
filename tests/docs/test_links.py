"""Every link of the documentation leads to a file that is there, and to a heading that is there."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from documents import PAGES, ROOT, anchors, name_of

from documentation import pages


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in pages.links(page.read_text()):
        if not pages.is_inside(target) and not target.startswith("#"):
            assert not target.startswith("/"), f"{target} is absolute; write it from the page's folder"
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.is_file(), f"{target} leads to no file"
        assert file.is_relative_to(ROOT), f"{target} leads out of the repository"
        assert not anchor or anchor in anchors(file), f"{target}: {name_of(file)} has {sorted(anchors(file))}"


def test_linked_files_are_known_to_git() -> None:
    """A file that only this checkout has would be missing in every other one."""
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("no repository, or no git: whether linked files are in it was NOT checked")
    linked = {
        pages.linked(name_of(page), target)
        for page in PAGES
        for target in pages.links(page.read_text())
        if pages.is_inside(target)
    }
    ignored = subprocess.run(
        ["git", "check-ignore", "--stdin"], input="\n".join(linked), capture_output=True, text=True, cwd=ROOT
    )
    assert ignored.stdout == ""


def test_no_page_is_orphaned() -> None:
    """Every page of a user can be reached from the site's first page or its navigation."""
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        own = page.relative_to(ROOT / "docs").as_posix()
        assert own.startswith("decisions/") or f" {own}\n" in navigation, f"mkdocs.yml does not name {own}"


@pytest.mark.parametrize(
    ("page", "searched"),
    [
        ("training.md", True),
        ("repository/examples/README.md", True),
        ("decisions/engine.md", False),
        ("repository/benchmarks/gpu.md", False),
    ],
)
def test_contributors_pages_are_not_searched(page: str, searched: bool) -> None:
    """The theme's search leaves out a page that says so, and contributors follow links."""
    said = SimpleNamespace(file=SimpleNamespace(src_uri=page), meta={})
    assert pages.on_page_markdown("# A page", said, None, None) == "# A page"
    assert said.meta == ({} if searched else {"search": {"exclude": True}})


def test_the_site_is_built_with_warnings_as_errors() -> None:
    """MkDocs counts no warning that --quiet hides, and --strict then finds nothing."""
    (line,) = re.findall(r'^stage "site" .*mkdocs build(.*)$', (ROOT / "scripts" / "check").read_text(), re.MULTILINE)
    assert line.split() == ["--strict"]


def test_readme_has_at_most_110_lines() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 110
    assert max(len(line) for line in lines if not line.startswith(("|", "!"))) <= 128
