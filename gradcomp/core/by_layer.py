"""Rules for layers: the name of a layer decides which compressor it gets."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradcomp.core.compressor import Acc, Compressor, Layer, Steps, Traits
from gradcomp.core.requests import World

# The values of the trait rates, from the weakest need to the strongest.
NEEDS = ("unused", "used", "needed")


@dataclass(frozen=True)
class ByLayer(Compressor):
    """Chooses each layer's compressor: that of the first pattern that matches the layer's name, else the default.

    Patterns are those of file names: * stands for any characters.
    """

    rules: tuple[tuple[str, Compressor], ...]
    default: Compressor

    def __post_init__(self) -> None:
        for compressor in self._all():
            if isinstance(compressor, ByLayer):
                raise ValueError(f"{compressor}: rules for layers cannot contain rules for layers; write them as one list")
            if compressor.traits.whole_model:
                raise ValueError(
                    f"{compressor} needs the whole model in one bucket and cannot be used in rules for layers; use it alone"
                )
        patterns = [pattern for pattern, _ in self.rules]
        for i, pattern in enumerate(patterns):
            if not isinstance(pattern, str) or not pattern or pattern != pattern.strip() or {"=", ";"} & {*pattern}:
                raise ValueError(f"{pattern!r} is not a pattern of layers' names: leave out '=', ';' and spaces around it")
            if pattern in patterns[:i]:
                raise ValueError(f"the pattern {pattern!r} is given twice; keep one")

    def __str__(self) -> str:
        return "; ".join([str(self.default), *(f"{pattern}={compressor}" for pattern, compressor in self.rules)])

    def choose(self, name: str, layer: Layer) -> Compressor:
        for pattern, compressor in self.rules:
            if fnmatch.fnmatchcase(name, pattern):
                return compressor.choose(name, layer)
        return self.default.choose(name, layer)

    def misfit(self, names: Sequence[str]) -> str | None:
        known = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        without = [pattern for pattern, _ in self.rules if not any(fnmatch.fnmatchcase(name, pattern) for name in names)]
        return f"no layer that is trained has a name like {without[0]!r}; they are {known}" if without else None

    @property
    def traits(self) -> Traits:
        """Return the largest momentum of all compressors, and the strongest need of rates. One on updates takes all there."""
        every = [compressor.traits for compressor in self._all()]
        momentum, rates = max(each.momentum for each in every), max((each.rates for each in every), key=NEEDS.index)
        acts_on_updates = any(each.acts_on_updates for each in every)
        return Traits(momentum=momentum, rates=rates, acts_on_updates=acts_on_updates, outermost=True)

    def exchange(self, acc: Acc, state: Any, world: World) -> Steps:
        raise TypeError("ByLayer chooses compressors and has no exchange; call choose() for each layer")

    def _all(self) -> list[Compressor]:
        return [self.default, *(compressor for _, compressor in self.rules)]
