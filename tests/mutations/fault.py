"""A small fault that a hasty change could make and no compiler would notice."""

from __future__ import annotations

from collections.abc import Iterator
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


# By folder and by the tests that are to find them: each fault's name, with the right text and the wrong one.
Table = dict[str, dict[tuple[str, ...], dict[str, tuple[str, str]]]]


def faults(*tables: Table) -> Iterator[Fault]:
    """Make the faults of tables."""
    for table in tables:
        for folder, by_tests in table.items():
            for tests, found in by_tests.items():
                for name, (right, wrong) in found.items():
                    yield Fault(name, folder, right, wrong, tests)
