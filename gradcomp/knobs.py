"""Knobs: the settings of a compressor. Each is declared once, as a dataclass field with a default, a range and a line of help.

Checks, parsing, suggestions, canonical specs, describe(), help() and the documentation's tables are made from declarations.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

# The key of a knob's declaration in the metadata of its field.
METADATA_KEY = "knob"
# The types that a knob accepts, by the type of its default.
TYPES: dict[type, Any] = {bool: bool, int: numbers.Integral, float: numbers.Real, str: str}
# The same for messages.
TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


@dataclasses.dataclass(frozen=True)
class Knob:
    """The declaration of one knob. Bounds are exclusive (above, below) or inclusive (least, most); None is no bound.

    word: a text that stands in place of a number, or an empty one.
    default_of: the default of an instance, if it has its own.
    """

    help: str = ""
    above: float | None = None
    least: float | None = None
    below: float | None = None
    most: float | None = None
    choices: tuple[Any, ...] = ()
    multiple: int = 1
    word: str = ""
    default_of: Callable[[Any], Any] | None = None

    def allows(self, value: Any) -> bool:
        """Say whether a value of the right type is in the range."""
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
        """Return the range in words, to follow "must be"; an empty text where every value is allowed."""
        if self.choices:
            return "one of " + ", ".join(map(as_text, self.choices))
        low = self.above if self.least is None else self.least
        high = self.below if self.most in (None, math.inf) else self.most
        text = ""
        if low is not None and high is not None:
            text = f"in {'[' if self.above is None else '('}{as_text(low)}, {as_text(high)}{']' if self.below is None else ')'}"
        elif low is not None:
            text = f"{'above' if self.least is None else 'at least'} {as_text(low)}"
        elif high is not None:
            text = f"{'below' if self.most is None else 'at most'} {as_text(high)}"
        if self.multiple > 1:
            text += f"{' and ' if text else ''}a multiple of {self.multiple}"
        return f"{self.word} or {text}" if self.word else text


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
    word: str = "",
    default_of: Callable[[Any], Any] | None = None,
) -> Any:
    """Declare a knob as a field of a frozen dataclass.

    Args:
        default: The value where a spec gives none. Its type is the knob's type.
        help: One line for `describe()` and the documentation.
        above: Exclusive lower bound.
        least: Inclusive lower bound.
        below: Exclusive upper bound.
        most: Inclusive upper bound.
        choices: The allowed values.
        multiple: A number that divides every allowed value.
        word: A text allowed in place of a number.
        default_of: The default of an instance, if it has its own.
    """
    declared = Knob(help, above, least, below, most, tuple(choices), multiple, word, default_of)
    return dataclasses.field(default=default, metadata={METADATA_KEY: declared})


def knobs_of(kind: Any) -> dict[str, dataclasses.Field[Any]]:
    """Return the knobs of a dataclass or an instance by name: its fields with a default of type bool, int, float or str."""
    if not dataclasses.is_dataclass(kind):
        return {}
    plain = (bool, int, float, str)
    return {field.name: field for field in dataclasses.fields(kind) if isinstance(field.default, plain)}


def declaration(field: dataclasses.Field[Any]) -> Knob:
    """Return the declaration of a knob, or an empty one if the field was not made by knob()."""
    declared: Knob = field.metadata.get(METADATA_KEY, Knob())
    return declared


def check(instance: Any, name: str) -> None:
    """Refuse values of a wrong type or out of range. Numbers of other libraries become Python's.

    name: the compressor's name. Messages begin with it.
    """
    for field in knobs_of(instance).values():
        kind, value, declared = type_of(field), getattr(instance, field.name), declaration(field)
        if declared.word and value == declared.word:
            continue
        fits = isinstance(value, TYPES[kind]) and (kind is bool or not isinstance(value, bool))
        if fits and (type(value) is not kind or value == 0):
            try:
                value = kind(value) or kind()  # -0.0 becomes 0.0
            except OverflowError:  # an int too large for a float
                value = math.inf
            object.__setattr__(instance, field.name, value)
        subject = f"{name}: {field.name}={as_text(value) if fits else repr(value)}"
        if not fits:
            raise TypeError(f"{subject} must be {_in_words(field)}")
        if not declared.allows(value):
            finite = " and finite" if declared.range and value == math.inf else ""
            raise ValueError(f"{subject} must be {declared.range or 'finite'}{finite}{suggestion(value, declared.choices)}")


def parse(spec: str, field: dataclasses.Field[Any], text: str) -> Any:
    """Read the value of a knob from its text in a spec."""
    kind = type_of(field)
    try:
        if text == declaration(field).word:
            return text
        if kind is bool:
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[text.lower()]
        return kind(f"{text[:-1]}e-2" if kind is float and text.endswith("%") else text)
    except (ValueError, KeyError):
        raise ValueError(f"{spec!r}: {field.name}={text} must be {_in_words(field)}") from None


def type_of(field: dataclasses.Field[Any]) -> type:
    """Return the type of a knob's values: its default's, or float where the default is a word."""
    return float if declaration(field).word else type(field.default)


def _in_words(field: dataclasses.Field[Any]) -> str:
    word = declaration(field).word
    return f"{word} or {TYPE_NAMES[type_of(field)]}" if word else TYPE_NAMES[type_of(field)]


def as_text(value: Any) -> str:
    """Write a value as in a spec."""
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


def changed(instance: Any) -> list[str]:
    """List the knobs that differ from their defaults as "name=value", in the order of declaration."""
    values = ((name, getattr(instance, name), field.default) for name, field in knobs_of(instance).items())
    return [f"{name}={as_text(value)}" for name, value, default in values if value != default]


def suggestion(word: Any, known: Iterable[Any]) -> str:
    """Suggest the known word closest to a misspelt one, as the end of a message. Empty where none is close."""
    near = nearest(str(word), map(str, known))
    return f" (did you mean {near!r}?)" if near else ""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the known word closest to a misspelt one, or an empty text."""
    return next(iter(difflib.get_close_matches(word.lower(), list(known), n=1)), "")


def rows(kind: Any) -> list[tuple[str, str, str, str]]:
    """Return the name, value, range and help of every knob: the defaults of a class, the values of an instance."""
    table = []
    for name, field in knobs_of(kind).items():
        declared = declaration(field)
        text = declared.help
        anything = "true, false" if isinstance(field.default, bool) else "any"
        range_ = ", ".join(map(as_text, declared.choices)) or declared.range or anything
        value = getattr(kind, name)
        default = field.default if declared.default_of is None or isinstance(kind, type) else declared.default_of(kind)
        if value != default:
            text += f" (default {as_text(default)})"
        table.append((name, as_text(value), range_, text))
    return table


def document(kind: type) -> str | None:
    """Return a class's docstring, followed by its knobs. The class need not be a dataclass yet."""
    inherited = getattr(kind, "__dataclass_fields__", {})
    own = {name: value for name, value in vars(kind).items() if isinstance(value, dataclasses.Field)}
    helps = {name: declaration(field).help for name, field in {**inherited, **own}.items()}
    lines = [f"    {name}: {text}" for name, text in helps.items() if text]
    return "\n".join([kind.__doc__ or kind.__name__, "", "Knobs:", *lines]) if lines else kind.__doc__


def table_of(kind: Any, width: int = 128) -> str:
    """Lay the knobs out for a terminal, one to a line or more."""
    lines = []
    for name, default, range_, text in rows(kind):
        head = f"  {name}={default}"
        lines += textwrap.wrap(f"{text} [{range_}]", width, initial_indent=f"{head:<24}", subsequent_indent=" " * 24)
    return "\n".join(lines)
