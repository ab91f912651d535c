"""Knobs: the settings of a compressor, each declared once as a dataclass field with its default, its range and a line of help.

Checking, parsing, suggestions, canonical specs, describe(), help() and the documentation's tables all follow from that.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
import textwrap
from collections.abc import Iterable
from typing import Any

MARK = "knob"
TYPES: dict[type, Any] = {bool: bool, int: numbers.Integral, float: numbers.Real, str: str}
"""What a knob takes, by the type of its default."""


@dataclasses.dataclass(frozen=True)
class Knob:
    """The declaration of one knob: bounds are exclusive (above, below) or inclusive (least, most); None is no bound."""

    help: str = ""
    above: float | None = None
    least: float | None = None
    below: float | None = None
    most: float | None = None
    choices: tuple[Any, ...] = ()
    multiple: int = 1
    ablation: bool = False

    def allows(self, value: Any) -> bool:
        """Whether a value of the right type is in the range."""
        if self.choices:
            return value in self.choices
        if not isinstance(value, int | float):
            return True
        return (
            (isinstance(value, int) or math.isfinite(value) or value == self.most)
            and (self.above is None or value > self.above)
            and (self.least is None or value >= self.least)
            and (self.below is None or value < self.below)
            and (self.most is None or value <= self.most)
            and (self.multiple == 1 or value % self.multiple == 0)
        )

    @property
    def range(self) -> str:
        """The range in words, to stand after "must be"; empty where anything goes."""
        if self.choices:
            return "one of " + ", ".join(map(shown, self.choices))
        low = self.above if self.least is None else self.least
        high = self.below if self.most is None else self.most
        text = ""
        if low is not None and high is not None:
            text = f"in {'[' if self.above is None else '('}{shown(low)}, {shown(high)}{']' if self.below is None else ')'}"
        elif low is not None:
            text = f"{'above' if self.least is None else 'at least'} {shown(low)}"
        elif high is not None:
            text = f"{'below' if self.most is None else 'at most'} {shown(high)}"
        if self.most == math.inf:
            text = f"{'above' if self.least is None else 'at least'} {shown(low)}"
        if self.multiple > 1:
            text += f"{' and ' if text else ''}a multiple of {self.multiple}"
        return text


def knob(
    default: Any,
    help: str,
    *,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    most: float | None = None,
    choices: Iterable[Any] = (),
    multiple: int = 1,
    ablation: bool = False,
) -> Any:
    """Declare a knob as a field of a frozen dataclass.

    default: its value where nothing is said; its type is the knob's. help: one line. above, least, below, most: its bounds.
    choices: all that it may be. multiple: what it must be a multiple of. ablation: it only serves to show what a part is worth.
    """
    declared = Knob(help, above, least, below, most, tuple(choices), multiple, ablation)
    return dataclasses.field(default=default, metadata={MARK: declared})


def knobs_of(kind: Any) -> dict[str, dataclasses.Field[Any]]:
    """The knobs of a dataclass or of an instance, by name: all its fields that have a plain default."""
    if not dataclasses.is_dataclass(kind):
        return {}
    plain = (bool, int, float, str)
    return {field.name: field for field in dataclasses.fields(kind) if isinstance(field.default, plain)}


def declared(field: dataclasses.Field[Any]) -> Knob:
    """The declaration of a knob; an empty one where the field is a plain one."""
    found: Knob = field.metadata.get(MARK, Knob())
    return found


def check(instance: Any, name: str) -> None:
    """Refuse values of the wrong type or out of range, in a compressor's name. Numbers of other libraries become Python's."""
    for field in knobs_of(instance).values():
        kind: type = type(field.default)
        value, own = getattr(instance, field.name), declared(field)
        fits = isinstance(value, TYPES[kind]) and (kind is bool or not isinstance(value, bool))
        if fits and (type(value) is not kind or value == 0):
            try:
                value = kind(value) or kind()  # without the sign of a zero
            except OverflowError:  # of a whole number that no float holds
                value = math.inf
            object.__setattr__(instance, field.name, value)
        said = f"{name}: {field.name}={shown(value) if fits else repr(value)} must be"
        if not fits:
            raise TypeError(f"{said} of type {kind.__name__}")
        if not own.allows(value):
            finite = " and finite" if own.range and value == math.inf else ""
            raise ValueError(f"{said} {own.range or 'finite'}{finite}{suggested(value, own.choices)}")


def parse(spec: str, field: dataclasses.Field[Any], text: str) -> Any:
    """The value that a text in a spec stands for."""
    kind: type = type(field.default)
    try:
        if kind is bool:
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[text.lower()]
        return kind(text)
    except (ValueError, KeyError):
        raise ValueError(f"{spec!r}: {field.name}={text} must be of type {kind.__name__}") from None


def shown(value: Any) -> str:
    """A value as a spec has it."""
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


def given(instance: Any) -> list[str]:
    """The knobs that differ from their defaults, as "name=value", in the order of their declaration."""
    found = ((name, getattr(instance, name), field.default) for name, field in knobs_of(instance).items())
    return [f"{name}={shown(value)}" for name, value, default in found if value != default]


def suggested(word: Any, known: Iterable[Any]) -> str:
    """The known word that is closest to a misspelt one, as the end of a message; empty where none is close."""
    near = difflib.get_close_matches(str(word).lower(), list(map(str, known)), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def rows(kind: Any) -> list[tuple[str, str, str, str]]:
    """For every knob its name, its default, its range, and its help; what only serves ablation says so."""
    found = []
    for name, field in knobs_of(kind).items():
        own = declared(field)
        text = own.help + (" (for ablation)" if own.ablation else "")
        range_ = (
            ", ".join(map(shown, own.choices)) or own.range or ("true, false" if isinstance(field.default, bool) else "any")
        )
        found.append((name, shown(field.default), range_, text))
    return found


def document(kind: type) -> str | None:
    """The docstring of a compressor's class with its knobs behind it, before the class has become a dataclass."""
    inherited = getattr(kind, "__dataclass_fields__", {})
    own = {name: value for name, value in vars(kind).items() if isinstance(value, dataclasses.Field)}
    lines = [f"    {name}: {declared(field).help}" for name, field in {**inherited, **own}.items() if declared(field).help]
    return "\n".join([kind.__doc__ or kind.__name__, "", "Knobs:", *lines]) if lines else kind.__doc__


def listed(kind: Any, width: int = 128) -> str:
    """The knobs as lines for people to read."""
    lines = []
    for name, default, range_, text in rows(kind):
        head = f"  {name}={default}"
        lines += textwrap.wrap(f"{text} [{range_}]", width, initial_indent=f"{head:<24}", subsequent_indent=" " * 24)
    return "\n".join(lines)
