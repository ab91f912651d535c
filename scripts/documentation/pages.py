"""A hook of MkDocs: takes what pages link to outside docs/ into the site, and keeps contributors' pages out of the search.

A link may lead anywhere in the repository, as it does where the pages are read as files. The site keeps a copy of each such
file under repository/. Pages among these copies may have links, too.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DOCS = "docs"
COPIES = "repository"
# The copies that users search, too.
USERS = (f"{COPIES}/SECURITY.md", f"{COPIES}/examples/README.md")

# Code in Markdown, which is left alone, or a link, its text aside: ](target#anchor). Titles are not used.
_LINK = re.compile(r"^```.*?^```$|`[^`\n]+`|\]\((?P<target>[^)\s]+)\)", re.MULTILINE | re.DOTALL)


def links(markdown: str) -> Iterator[str]:
    """List the targets of a page's links, without those in code."""
    yield from (found["target"] for found in _LINK.finditer(markdown) if found["target"])


def is_inside(target: str) -> bool:
    """Decide whether a link stays in the repository and names a file."""
    return not re.match(r"[a-z][a-z0-9+.-]*:|#|/", target)


def place(path: str) -> str:
    """Return the site's path of a file of the repository."""
    inner = PurePosixPath(path)
    return str(inner.relative_to(DOCS)) if inner.is_relative_to(DOCS) else f"{COPIES}/{path}"


def origin(source: str) -> str:
    """Return the repository's path of a page of the site."""
    return source.removeprefix(f"{COPIES}/") if source.startswith(f"{COPIES}/") else f"{DOCS}/{source}"


def linked(path: str, target: str) -> str:
    """Return the repository's path of what a link in a file leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), target.partition("#")[0]))


def outside(paths: list[str]) -> list[str]:
    """List the files that these files link to outside docs/, and those that such pages link to in turn."""
    found: list[str] = []
    waiting = [path for path in paths if path.endswith(".md")]
    while waiting:
        path = waiting.pop()
        for target in filter(is_inside, links((ROOT / path).read_text())):
            file = linked(path, target)
            if not file.startswith(f"{DOCS}/") and file not in found and (ROOT / file).is_file():
                found.append(file)
                waiting += [file] if file.endswith(".md") else []
    return sorted(found)


def rewritten(path: str, markdown: str) -> str:
    """Return a page with links to the site's places."""

    def replace(found: re.Match[str]) -> str:
        target = found["target"]
        if not target or not is_inside(target):
            return found[0]
        file, mark, anchor = target.partition("#")
        there = posixpath.relpath(place(linked(path, file)), posixpath.dirname(place(path)) or ".")
        return f"]({there}{mark}{anchor})"

    return _LINK.sub(replace, markdown)


# What MkDocs calls.


def on_files(files: Any, config: Any) -> Any:
    """Add copies of what pages link to outside docs/."""
    from mkdocs.structure.files import File, InclusionLevel

    for path in outside([origin(file.src_uri) for file in files]):
        file = File.generated(config, place(path), abs_src_path=os.fspath(ROOT / path))
        file.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(file)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn links out of docs/ into links to the copies, and keep contributors' pages out of the search."""
    if page.file.src_uri.startswith(("decisions/", f"{COPIES}/")) and page.file.src_uri not in USERS:
        page.meta["search"] = {"exclude": True}
    return rewritten(origin(page.file.src_uri), markdown)
