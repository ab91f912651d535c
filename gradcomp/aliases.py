"""The category of warnings, and options with two names: the ecosystem's beside gradcomp's."""

from __future__ import annotations

from typing import Any


class GradcompWarning(UserWarning):
    """The category of gradcomp's warnings: warnings.filterwarnings("error", category=gradcomp.GradcompWarning)."""


def either(default: Any, **given: Any) -> Any:
    """Return the value of an option by whichever of its names it was given. Refuse two values that differ."""
    found = {name: value for name, value in given.items() if value is not None}
    if any(value != next(iter(found.values())) for value in found.values()):
        both = " and ".join(f"{name}={value!r}" for name, value in found.items())
        raise ValueError(f"{both} are two names of one option, with different values; give one of them")
    return next(iter(found.values()), default)
