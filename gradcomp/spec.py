"""Specs: "name:knob=value,knob=value" and the compressor that it means. A file or folder in compressors/ is a name."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from gradcomp import compressors, knobs
from gradcomp.engine.by_host import ByHost
from gradcomp.engine.by_layer import ByLayer
from gradcomp.engine.feedback import Feedback, complete
from gradcomp.knobs import knob
from gradcomp.protocol import Compressor


@dataclasses.dataclass
class Hosts:
    """The knob that every compressor has from by_host."""

    by_host: bool = knob(False, "dense inside a host, compressed between hosts: for hosts with several ranks")


WRAPPERS = (Feedback, Hosts)
COMMON = {name: field for each in WRAPPERS for name, field in knobs.knobs_of(each).items()}
"""The knobs that every compressor has beside its own."""


def names() -> list[str]:
    """List the names of all compressors."""
    return list(_names())


@functools.cache
def _names() -> tuple[str, ...]:
    return tuple(sorted(module.name for module in pkgutil.iter_modules(compressors.__path__)))


@functools.cache
def kind_of(name: str) -> type[Compressor]:
    """The compressor class of this name: the one its file defines."""
    if name not in names():
        raise ValueError(f"there is no compressor {name!r}{knobs.suggested(name, names())}; known: {', '.join(names())}")
    module = importlib.import_module(f"{compressors.__name__}.{name}")
    own = [kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == module.__name__]
    (found,) = [kind for kind in own if issubclass(kind, Compressor)]
    return found


def make(spec: str | Compressor) -> Compressor:
    """Make the compressor that a spec describes: "name" or "name:knob=value,knob=value".

    Rules for layers by name may follow, the first that matches counts: "sdagc; *.bias=dense; embed*=topk:ratio=0.01".
    A compressor that needs error feedback gets it, also one that was made by hand, unless the spec says feedback=false.
    """
    if isinstance(spec, Compressor):
        return _whole(spec, {})
    if not isinstance(spec, str):
        raise TypeError(f'a spec such as "topk:ratio=0.01" or a compressor is needed, not a {type(spec).__name__}')
    first, *rules = spec.split(";")
    if not rules:
        return _one(first)
    return _by_layer([_rule(spec, rule) for rule in rules if rule.strip()], first)


def by_layer(rules: Mapping[str, str | Compressor], default: str | Compressor) -> Compressor:
    """Make a compressor for each layer: that of the first pattern (of file names) its name matches, else the default.

    by_layer({"*.bias": "dense", "embed*": "topk:ratio=0.01"}, "sdagc") is what the spec
    "sdagc; *.bias=dense; embed*=topk:ratio=0.01" means.
    """
    return _by_layer(list(rules.items()), default)


def describe(name: str) -> str:
    """Describe a compressor: what it does, and its knobs with their defaults and ranges."""
    kind = kind_of(name)
    told = textwrap.dedent(sys.modules[kind.__module__].__doc__ or "").strip()
    parts = [f"{name}\n\n{told}"]
    if own := knobs.listed(kind):
        parts.append(f"Knobs:\n{own}")
    parts.append("Knobs of every compressor:\n" + "\n".join(map(knobs.listed, WRAPPERS)))
    return "\n\n".join(parts)


def summary(name: str) -> str:
    """What a compressor does, in the first sentence of its file."""
    told = (sys.modules[kind_of(name).__module__].__doc__ or "").strip().split("\n\n")[0]
    return " ".join(told.split()).split("; ")[0].rstrip(".")


def _by_layer(rules: Sequence[tuple[str, str | Compressor]], default: str | Compressor) -> Compressor:
    made = tuple((pattern, make(spec)) for pattern, spec in rules)
    return ByLayer(made, make(default)) if made else make(default)


def _rule(spec: str, rule: str) -> tuple[str, str]:
    pattern, equals, own = rule.partition("=")
    if not equals or not pattern.strip() or not own.strip():
        raise ValueError(f"{spec!r}: {rule.strip()!r} is not of the form pattern=spec")
    return pattern.strip(), own


def _one(spec: str) -> Compressor:
    name, _, tail = spec.strip().partition(":")
    kind = kind_of(name.strip())
    fields = knobs.knobs_of(kind)
    own: dict[str, Any] = {}
    wrapper: dict[str, Any] = {}
    for knob_, text in _pairs(spec, tail):
        if knob_ in own or knob_ in wrapper:
            raise ValueError(f"{spec!r}: the knob {knob_!r} is given twice")
        if knob_ in fields:
            own[knob_] = knobs.parse(spec, fields[knob_], text)
        elif knob_ in COMMON:
            wrapper[knob_] = knobs.parse(spec, COMMON[knob_], text)
        else:
            known = [*fields, *COMMON]
            raise ValueError(
                f"{spec!r}: {name.strip()} has no knob {knob_!r}{knobs.suggested(knob_, known)}; known: {', '.join(known)}"
            )
    return _whole(kind(**own), wrapper)


def _whole(compressor: Compressor, asked: dict[str, Any]) -> Compressor:
    """The compressor with the wrappers that it needs, or that are asked for."""
    if asked.pop("by_host", False):
        compressor = ByHost(compressor)
    made = complete(compressor, **asked)
    if isinstance(made, Feedback) and made.inner.traits.unbiased and made == Feedback(made.inner, feedback=False):
        return made.inner  # without anything that comes with error feedback
    return made


def _pairs(spec: str, tail: str) -> list[tuple[str, str]]:
    pairs = []
    for item in filter(None, (part.strip() for part in tail.split(","))):
        knob_, equals, text = item.partition("=")
        if not equals or not knob_.strip() or not text.strip():
            raise ValueError(f"{spec!r}: {item!r} is not of the form knob=value")
        pairs.append((knob_.strip(), text.strip()))
    return pairs
