"""Specs: make a compressor from "name:knob=value,knob=value". Each file or folder in compressors/ is a name."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import pkgutil
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from gradcomp import compressors, knobs
from gradcomp.core.by_host import ByHost
from gradcomp.core.by_layer import ByLayer
from gradcomp.core.compressor import Compressor
from gradcomp.core.wrapper import Wrapper
from gradcomp.engine.feedback import Feedback, with_feedback
from gradcomp.knobs import knob


@dataclasses.dataclass
class HostKnobs:
    """The knob by_host, which every compressor has. It wraps the compressor in ByHost."""

    by_host: bool = knob(False, "compress between hosts only, dense inside a host; for hosts with several ranks")


# The classes that declare the knobs of every compressor.
KNOB_CLASSES = (Feedback, HostKnobs)
# The knobs that every compressor has, by name.
COMMON = {name: field for each in KNOB_CLASSES for name, field in knobs.knobs_of(each).items()}


# The spec of no compressor, and the losses that its knob allows, from the least to the most.
AUTO = "auto"
LOSSES = ("none", "low", "high")


@dataclasses.dataclass(frozen=True)
class Auto:
    """Auto: chooses, in the first steps, the fastest compressor that loses no more than allowed.

    Candidates take some steps each, from the one that sends the fewest bytes to uncompressed exchange, and the ranks agree on
    the fastest. One that loses more must be 1 % faster. They compete again when step times or the link change.
    """

    loss: str = knob(
        "low",
        "none: rounding to 16 bits; low: rounding to 5 bits; high: few entries, the others later",
        choices=LOSSES,
    )

    def __post_init__(self) -> None:
        knobs.check(self, AUTO)

    def __str__(self) -> str:
        return ":".join(filter(None, (AUTO, ",".join(knobs.changed(self)))))


def auto_of(spec: str | Compressor) -> Auto | None:
    """Return the knobs of "auto" or "auto:loss=high"; None for any other spec."""
    if not isinstance(spec, str) or spec.partition(":")[0].strip() != AUTO:
        return None
    return Auto(**settings_of(spec, knobs.knobs_of(Auto)))


def names() -> list[str]:
    """List the names of all compressors.

    Returns:
        The names that a spec can begin with, in alphabetical order. `auto` is none of them: it chooses a compressor.

    Examples:
        >>> "topk" in gradcomp.names()
        True
    """
    return sorted(module.name for module in pkgutil.iter_modules(compressors.__path__))


@functools.cache
def kind_of(name: str) -> type[Compressor]:
    """Find the compressor class of a name, the only one that its file defines."""
    if re.fullmatch(r"[^\s:,()=]+\s*=\s*[^\s:,()=]+", name):
        raise ValueError(f"{name!r} is a rule for layers; before it comes the spec of all other layers: 'topk; {name}'")
    if name == AUTO:
        raise ValueError(
            "auto is not a compressor: it chooses one while real ranks train; pass it alone, as the spec of a real run"
        )
    if name not in names():
        raise ValueError(f"there is no compressor {name!r}{_suggestion(name)}; known: {', '.join([*names(), AUTO])}")
    module = importlib.import_module(f"{compressors.__name__}.{name}")
    classes = [kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == module.__name__]
    (found,) = [kind for kind in classes if issubclass(kind, Compressor)]
    return found


def class_called(name: str) -> type[Compressor]:
    """Find the class of this name: that of the compressor whose name has the same letters."""
    return kind_of(next(each for each in names() if each.replace("_", "") == name.lower()))


def make(spec: str | Compressor) -> Compressor:
    """Make the compressor that a spec describes.

    A compressor that needs error feedback gets it unless the spec says feedback=false. This includes compressor objects.

    Args:
        spec: `"name"` or `"name:knob=value,knob=value"`, as in `"topk:ratio=1%"`. Rules for layers may follow, as in
            `"sdagc; *.bias=dense; embed*=topk"`: the first pattern that matches a layer's name decides. Or a compressor, such
            as `gradcomp.TopK(ratio=0.01)`.

    Returns:
        The compressor. Its `str()` is the canonical spec: the name, and the knobs that differ from their defaults.

    Raises:
        ValueError: The name or a knob is unknown, or a value is out of its range. The message names the nearest known one.
        TypeError: The spec is neither a text nor a compressor.

    Examples:
        >>> str(gradcomp.make("topk:ratio=0.010,momentum=0.9"))
        'topk:momentum=0.9'
    """
    if isinstance(spec, Compressor):
        return _wrap(spec, {})
    given: Any = spec
    if not isinstance(given, str):
        what = f"the class {given.__name__}" if isinstance(given, type) else f"a {type(given).__name__}"
        raise TypeError(f'the spec is {what}; pass a spec such as "topk:ratio=0.01", or a compressor object')
    first, *rules = spec.split(";")
    if not rules:
        return _parse(first)
    return _by_layer([_parse_rule(spec, first, rule) for rule in rules if rule.strip()], first)


def by_layer(rules: Mapping[str, str | Compressor], default: str | Compressor) -> Compressor:
    """Make a compressor that compresses layers by rules. The first pattern that matches a layer's name decides.

    Args:
        rules: A spec or a compressor by pattern. Patterns are those of file names: `*` stands for any characters.
        default: The spec or compressor of layers that no pattern matches.

    Returns:
        The compressor, the same as `make()` makes of a spec with rules.

    Raises:
        ValueError: A spec or a pattern cannot be used. The message says why.

    Examples:
        >>> str(gradcomp.by_layer({"*.bias": "dense", "embed*": "topk"}, "sdagc"))
        'sdagc; *.bias=dense; embed*=topk'
    """
    return _by_layer(list(rules.items()), default)


def describe(name: str | Compressor) -> str:
    """Describe a compressor: its method, and its knobs with their defaults and ranges.

    Args:
        name: A compressor's name, a spec, or a compressor. A spec's own values stand in place of the defaults. Rules for layers
            are listed.

    Returns:
        Text for a terminal, as `gradcomp describe NAME` prints it.

    Raises:
        ValueError: The name or a knob is unknown, or a value is out of its range.

    Examples:
        >>> print(gradcomp.describe("topk:ratio=0.05"))  # doctest: +SKIP
    """
    name = str(name)
    first, *rest = (part.strip() for part in name.split(";"))
    if not rest and (auto := auto_of(first)) is not None:
        return f"{first}\n\n{inspect.getdoc(auto)}\n\nKnobs:\n{knobs.table_of(auto)}"
    rules = [_parse_rule(name, first, rule) for rule in rest if rule]
    if rules:
        make(name)  # refuses what make() refuses
    kind = kind_of(first.partition(":")[0].strip())
    made: Compressor | None = make(first)
    shown: dict[type, Any] = {each: each for each in (kind, *KNOB_CLASSES)}
    while made is not None:
        shown |= {HostKnobs: HostKnobs(by_host=True)} if isinstance(made, ByHost) else {type(made): made}
        made = made.inner if isinstance(made, Wrapper) else None
    method = textwrap.dedent(sys.modules[kind.__module__].__doc__ or "").strip()
    parts = [f"{first}\n\n{method}"]
    if table := knobs.table_of(shown[kind]):
        parts.append(f"Knobs:\n{table}")
    parts.append("Knobs of every compressor:\n" + "\n".join(knobs.table_of(shown[each]) for each in KNOB_CLASSES))
    if rules:
        lines = [f"  {pattern} = {spec}" for pattern, spec in rules]
        parts.append("\n".join(["Rules for layers; the first that matches decides:", *lines]))
    return "\n\n".join(parts)


list_compressors = names
make_compressor = make


def summary(name: str) -> str:
    """Return the first paragraph of a compressor's file, cut at its first semicolon."""
    described = Auto if name == AUTO else sys.modules[kind_of(name).__module__]
    opening = (described.__doc__ or "").strip().split("\n\n")[0]
    return " ".join(opening.split()).split("; ")[0].rstrip(".")


def _by_layer(rules: Sequence[tuple[str, str | Compressor]], default: str | Compressor) -> Compressor:
    made = tuple((pattern, make(spec)) for pattern, spec in rules)
    return ByLayer(made, make(default)) if made else make(default)


def _suggestion(name: str) -> str:
    """Suggest a spec for another's word, or a misspelt name, with knobs behind a wrong separator: "topk ratio=0.01"."""
    word, *pairs = [part for part in re.split(r"[\s,:()'\"]+", name) if part] or [""]
    known_as = {word: spec for each in names() for word, spec in kind_of(each).known_as.items()}
    if (spec := known_as.get(word.lower())) is not None:
        return f" (did you mean {spec!r}?)"
    near = knobs.nearest(word, [*names(), AUTO])
    return f" (did you mean {':'.join([near, ','.join(pairs)] if pairs else [near])!r}?)" if near else ""


def _parse_rule(spec: str, first: str, rule: str) -> tuple[str, str]:
    pattern, equals, of_layer = (part.strip() for part in rule.partition("="))
    name = first.partition(":")[0].strip()
    if name in names() and pattern in (*knobs.knobs_of(kind_of(name)), *COMMON) and of_layer.partition(":")[0] not in names():
        comma = f"{first.strip()}{',' if ':' in first else ':'}{rule.strip()}"
        raise ValueError(f"{spec!r}: ';' begins a rule for layers, but {pattern} is a knob (did you mean {comma!r}?)")
    if not equals or not pattern or not of_layer:
        raise ValueError(
            f"{spec!r}: {rule.strip()!r} is not of the form pattern=spec; rules follow the spec of all other layers, as in "
            "'topk; *.bias=dense'"
        )
    return pattern, of_layer


def _parse(spec: str) -> Compressor:
    kind = kind_of(spec.partition(":")[0].strip())
    fields = knobs.knobs_of(kind)
    settings = settings_of(spec, {**fields, **COMMON, **{name: fields[of] for name, of in kind.also.items()}})
    return _wrap(
        kind(**{name: value for name, value in settings.items() if name in fields}),
        {name: value for name, value in settings.items() if name not in fields},
    )


def settings_of(spec: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Read the knobs of a spec. fields: those that its name knows."""
    name, _, tail = spec.strip().partition(":")
    settings: dict[str, Any] = {}
    for knob_, text in _split(spec, tail, [*fields]):
        if knob_ in fields and fields[knob_].name in settings:
            raise ValueError(f"{spec!r}: the knob {fields[knob_].name!r} is given twice; keep one")
        if knob_ not in fields:
            near = knobs.suggestion(knob_, [*fields])
            raise ValueError(f"{spec!r}: {name.strip()} has no knob {knob_!r}{near}; known: {', '.join(fields)}")
        settings[fields[knob_].name] = knobs.parse(spec, fields[knob_], text)
    return settings


def _wrap(compressor: Compressor, settings: dict[str, Any]) -> Compressor:
    """Wrap a compressor as it needs, or as the wrapper knobs in `settings` say."""
    if settings.pop("by_host", False):
        compressor = ByHost(compressor)
    made = with_feedback(compressor, **settings)
    if isinstance(made, Feedback) and made.inner.traits.exact and made == Feedback(made.inner, feedback=False):
        return made.inner  # feedback=false alone changes nothing
    return made


def _split(spec: str, tail: str, known: Sequence[str]) -> list[tuple[str, str]]:
    pairs = []
    for item in filter(None, (part.strip() for part in tail.split(","))):
        knob_, equals, text = item.partition("=")
        if not equals or not knob_.strip() or not text.strip():
            raise ValueError(f"{spec!r}: {item!r} is not of the form knob=value; known knobs: {', '.join(known)}")
        if re.search(r"[\s:]\w+\s*=", text):
            meant = re.sub(r"[\s:,]+(?=\w+\s*=)", ",", tail).replace(" ", "")
            raise ValueError(f"{spec!r}: commas separate knobs (did you mean '{spec.partition(':')[0].strip()}:{meant}'?)")
        pairs.append((knob_.strip(), text.strip()))
    return pairs
