"""auto as a test wants it: the candidates that it tries, and the one that it then takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from gradcomp import auto


@contextmanager
def chosen(*wanted: str) -> Iterator[None]:
    """Have auto try these candidates, once each, and go on with the last."""
    every = auto.candidates

    def offered(*arguments: Any) -> list[auto.Candidate]:
        return [candidate for candidate in every(*arguments) if str(candidate) in wanted]

    patched = {
        "candidates": offered,
        "best_of": lambda ordered, seconds, present: next(each for each in ordered if str(each) == wanted[-1]),
        "_reason": lambda chosen, seconds: "a test wants it",
        "ODD_CHECKS": 10**6,
        "MOST_ODD_CHECKS": 10**6,
        "COUNTED": 2,
        "STOP": 10**6,
        "NEAR": 0,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in patched.items():
            patch.setattr(auto, name, value)
        yield
