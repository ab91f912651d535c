"""Tests of times that this machine takes: a pause of the machine spoils one trial, not all of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec

import pytest

Arguments = ParamSpec("Arguments")

# The trials of a test. What is wrong in itself fails in each.
TRIALS = 3


def steady(test: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """Try a test again when an assertion fails, and let the last trial's failure stand."""

    @functools.wraps(test)
    def tried(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        for _ in range(TRIALS - 1):
            try:
                return test(*args, **kwargs)
            except AssertionError as error:
                print(f"tried again: {error}")
            for patch in (given for given in kwargs.values() if isinstance(given, pytest.MonkeyPatch)):
                patch.undo()
        return test(*args, **kwargs)

    return tried
