"""The category of warnings, and options with two names: the ecosystem's beside gradcomp's, or a new one beside an old one."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class GradcompWarning(UserWarning):
    """The category of gradcomp's warnings: warnings.filterwarnings("error", category=gradcomp.GradcompWarning)."""


def either(default: Any, **given: Any) -> Any:
    """Return the value of an option by whichever of its names it was given. Refuse two values that differ."""
    found = {name: value for name, value in given.items() if value is not None}
    if any(value != next(iter(found.values())) for value in found.values()):
        both = " and ".join(f"{name}={value!r}" for name, value in found.items())
        raise ValueError(f"{both} are two names of one option, with different values; give one of them")
    return next(iter(found.values()), default)


def formerly(**names: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Take options by their names of an earlier version, too, with a DeprecationWarning: formerly(old="new")."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def renamed(*args: P.args, **options: P.kwargs) -> T:
            for old in [old for old in names if old in options]:
                new, call = names[old], function.__name__
                text = f"{call}({old}=...) is deprecated, and the next version refuses it: write {call}({new}=...)"
                warnings.warn(text, DeprecationWarning, stacklevel=2)
                options[new] = either(None, **{old: options.pop(old), new: options.get(new)})
            return function(*args, **options)

        return renamed

    return decorate
