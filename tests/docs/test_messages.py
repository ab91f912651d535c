"""Every message that the page of troubleshooting quotes is one of the package's."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
QUOTES = re.findall(r"^### `(.+)`$", PAGE.read_text(), re.MULTILINE)
# What stands for a name or a number in a message.
HOLE = "\0"


def texts(tree: ast.AST) -> Iterator[str]:
    """List a file's texts. What is put in at run time is a hole; +, too, joins texts."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.JoinedStr, ast.Constant, ast.BinOp)):
            yield text_of(node)


def text_of(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else HOLE
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return HOLE


@cache
def messages() -> str:
    return "\n".join(text for path in (ROOT / "gradcomp").rglob("*.py") for text in texts(ast.parse(path.read_text())))


def is_said(quote: str) -> bool:
    """Decide whether a message has these words. `...` is a hole, or a word of a message without one."""
    pieces = [re.escape(piece.strip()) for piece in quote.split("...")]
    return re.search(rf"[ {HOLE}'{{}}()]*[^\n]{{0,40}}".join(pieces), messages()) is not None


def test_the_page_has_quotes() -> None:
    assert len(QUOTES) > 25
    assert not is_said("the gradient of ... came thrice in one step")


@pytest.mark.parametrize("quote", QUOTES)
def test_a_quoted_message_is_in_the_source(quote: str) -> None:
    assert is_said(quote), f"docs/troubleshooting.md quotes {quote!r}, which no text of gradcomp has"


def test_no_message_names_a_default_that_no_user_has_written() -> None:
    assert "momentum=auto" not in messages()
