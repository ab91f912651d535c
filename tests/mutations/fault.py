"""A small fault that a hasty change could make and no compiler would notice."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """One small fault: a text that stands once in a folder, and the wrong text in its place.

    tests: the files that are to find it, tried first. A fault that they let pass meets all other tests.
    """

    name: str
    folder: str
    right: str
    wrong: str
    tests: tuple[str, ...]
