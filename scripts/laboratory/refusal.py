"""The error of a command that cannot be carried out. It stands alone: gpu_check runs before gradcomp is built."""

import difflib
from collections.abc import Iterable


class Refused(ValueError):
    """A command that cannot be carried out. The message says what is wrong and what to do."""


def suggest(word: str, known: Iterable[str]) -> str:
    """Ask whether the nearest known word is meant; empty where none is near."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
