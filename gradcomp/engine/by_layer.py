"""A compressor of its own for the layers whose names match a pattern."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import Any

from gradcomp.protocol import Acc, Compressor, Layer, Steps, Traits
from gradcomp.requests import World


@dataclass(frozen=True)
class ByLayer(Compressor):
    """The first rule whose pattern (of file names) matches a layer's name counts, else the default."""

    rules: tuple[tuple[str, Compressor], ...]
    default: Compressor

    def __post_init__(self) -> None:
        for compressor in self._all():
            if isinstance(compressor, ByLayer):
                raise ValueError("rules for layers cannot stand inside one another")
            if compressor.traits.whole_model:
                raise ValueError(f"{compressor} needs the whole model in one bucket and cannot be one of several")
        patterns = [pattern for pattern, _ in self.rules]
        for i, pattern in enumerate(patterns):
            if not isinstance(pattern, str) or not pattern or pattern != pattern.strip() or {"=", ";"} & {*pattern}:
                raise ValueError(f"{pattern!r} is no pattern of layers' names: spaces around it, '=' and ';' cannot be in one")
            if pattern in patterns[:i]:
                raise ValueError(f"the pattern {pattern!r} is given twice")

    def __str__(self) -> str:
        return "; ".join([str(self.default), *(f"{pattern}={compressor}" for pattern, compressor in self.rules)])

    def choose(self, name: str, layer: Layer) -> Compressor:
        for pattern, compressor in self.rules:
            if fnmatch.fnmatchcase(name, pattern):
                return compressor.choose(name, layer)
        return self.default.choose(name, layer)

    @property
    def traits(self) -> Traits:
        """What the model's optimizer has to be asked for, of whichever needs most."""
        every = [compressor.traits for compressor in self._all()]
        momentum, rates = max(own.momentum for own in every), max((own.rates for own in every), key=RATES.index)
        return Traits(momentum=momentum, rates=rates, outermost=True)

    def exchange(self, acc: Acc, state: Any, world: World) -> Steps:
        raise TypeError("ByLayer only chooses; its compressors exchange")

    def _all(self) -> list[Compressor]:
        return [self.default, *(compressor for _, compressor in self.rules)]


RATES = ("unused", "used", "needed")
