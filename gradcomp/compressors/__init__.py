"""All compressors by name. A file in this folder is a compressor; a spec such as "topk:ratio=0.01" configures one."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from gradcomp.core import Compressor
from gradcomp.hosts import ByHost
from gradcomp.wrap import ByLayer, Feedback


@dataclasses.dataclass
class _Hosts:
    """A knob of make()'s own."""

    by_host: bool = False  # dense inside a host, compressed between hosts: for hosts with several ranks


_WRAPPER_KNOBS = {
    field.name: field for kind in (Feedback, _Hosts) for field in dataclasses.fields(kind) if field.name != "inner"
}


@functools.cache
def names() -> list[str]:
    """The names of all compressors."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


@functools.cache
def find(name: str) -> type[Compressor]:
    """The compressor class of this name: the one its file defines."""
    if name not in names():
        raise ValueError(f"there is no compressor {name!r}{_suggest(name, names())}; known: {', '.join(names())}")
    module = importlib.import_module(f"{__name__}.{name}")
    own = [kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == module.__name__]
    (found,) = [kind for kind in own if issubclass(kind, Compressor)]
    return found


def make(spec: str | Compressor) -> Compressor:
    """The compressor that a spec describes, "name" or "name:knob=value,knob=value", with error feedback unless it is unbiased.

    Rules for layers by name may follow, the first that matches counts: "sdagc; *.bias=dense; embed*=topk:ratio=0.01".
    A compressor that was made by hand is taken as it is.
    """
    if isinstance(spec, Compressor):
        return spec
    if not isinstance(spec, str):
        raise TypeError(f'a spec such as "topk:ratio=0.01" or a compressor is needed, not {spec!r}')
    first, *rules = spec.split(";")
    if not rules:
        return _one(first)
    return by_layer(dict(_rule(spec, rule) for rule in rules if rule.strip()), first)


def by_layer(rules: Mapping[str, str | Compressor], default: str | Compressor) -> ByLayer:
    """A compressor for each layer: that of the first pattern (of file names) its name matches, else the default."""
    made = ByLayer(tuple((pattern, make(spec)) for pattern, spec in rules.items()), make(default))
    for compressor in (made.default, *(compressor for _, compressor in made.rules)):
        if isinstance(compressor, ByLayer):
            raise ValueError("rules for layers cannot stand inside one another")
        if compressor.whole_model:
            raise ValueError(f"{compressor} needs the whole model in one bucket and cannot be one of several")
    return made


def _rule(spec: str, rule: str) -> tuple[str, str]:
    pattern, equals, own = rule.partition("=")
    if not equals or not pattern.strip() or not own.strip():
        raise ValueError(f"{spec!r}: {rule.strip()!r} is not of the form pattern=spec")
    return pattern.strip(), own


def _one(spec: str) -> Compressor:
    name, _, tail = spec.strip().partition(":")
    name = name.strip()
    kind = find(name)
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    own: dict[str, Any] = {}
    wrapper: dict[str, Any] = {}
    for knob, text in _pairs(spec, tail):
        if knob in own or knob in wrapper:
            raise ValueError(f"{spec!r}: the knob {knob!r} is given twice")
        if knob in fields:
            own[knob] = _value(spec, fields[knob], text)
        elif knob in _WRAPPER_KNOBS:
            wrapper[knob] = _value(spec, _WRAPPER_KNOBS[knob], text)
        else:
            known = [*fields, *_WRAPPER_KNOBS]
            raise ValueError(f"{spec!r}: {name} has no knob {knob!r}{_suggest(knob, known)}; known: {', '.join(known)}")
    compressor = kind(**own)
    if wrapper.pop("by_host", False):
        compressor = ByHost(compressor)
    return compressor if compressor.unbiased and not wrapper else Feedback(compressor, **wrapper)


def _pairs(spec: str, tail: str) -> list[tuple[str, str]]:
    pairs = []
    for item in filter(None, (part.strip() for part in tail.split(","))):
        knob, equals, text = item.partition("=")
        if not equals or not knob.strip() or not text.strip():
            raise ValueError(f"{spec!r}: {item!r} is not of the form knob=value")
        pairs.append((knob.strip(), text.strip()))
    return pairs


def _value(spec: str, field: dataclasses.Field[Any], text: str) -> Any:
    kind = getattr(field.type, "__name__", field.type)  # the class itself, or its name where annotations are postponed
    try:
        match kind:
            case "bool":
                return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[text.lower()]
            case "int":
                return int(text)
            case "float":
                return float(text)
            case _:
                return text
    except (ValueError, KeyError):
        raise ValueError(f"{spec!r}: {field.name} must be of type {kind}, not {text!r}") from None


def _suggest(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
