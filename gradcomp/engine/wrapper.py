"""A compressor around a compressor: what a wrapper does not change is forwarded, here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from gradcomp import knobs
from gradcomp.protocol import Compressor, Layer, Layout, Traits


@dataclass(frozen=True)
class Wrapper(Compressor):
    """Base of all wrappers. A subclass has an inner compressor, whose state is found in its own by within()."""

    inner: Compressor

    def __post_init__(self) -> None:
        knobs.check(self, self.name)
        if self.inner.traits.outermost:
            raise ValueError(f"{type(self).__name__} cannot go around {self.inner}, which brings error feedback along")

    @property
    def name(self) -> str:
        return self.inner.name

    def __str__(self) -> str:
        head, _, tail = str(self.inner).partition(":")
        return ":".join(filter(None, (head, ",".join(filter(None, (tail, *self.added()))))))

    def added(self) -> list[str]:
        """What the canonical spec has beside the inner compressor's knobs."""
        return knobs.given(self)

    def around(self, inner: Compressor) -> Wrapper:
        """The same wrapper around another compressor."""
        return replace(self, inner=inner)

    def within(self, state: Any) -> Any:
        """The inner compressor's state."""
        return state.inner

    @property
    def traits(self) -> Traits:
        return self.inner.traits

    def choose(self, name: str, layer: Layer) -> Compressor:
        chosen = self.inner.choose(name, layer)
        return self if chosen is self.inner else self.around(chosen)

    def ease(self, progress: float) -> Compressor | None:
        gentler = self.inner.ease(progress)
        return None if gentler is None else self.around(gentler)

    def init(self, layout: Layout, seed: int) -> Any:
        return self.inner.init(layout, seed)

    def refuses(self, feedback: bool) -> str | None:
        return self.inner.refuses(feedback)

    def revise(self, residual: Tensor, velocity: Tensor | None, state: Any, rates: tuple[float, ...]) -> None:
        self.inner.revise(residual, velocity, self.within(state), rates)

    def save(self, state: Any) -> dict[str, Any]:
        return self.inner.save(self.within(state))

    def load(self, state: Any, saved: Mapping[str, Any]) -> None:
        self.inner.load(self.within(state), saved)

    def alike(self, state: Any) -> str:
        return self.inner.alike(self.within(state))

    def stats(self, state: Any) -> dict[str, Any]:
        return self.inner.stats(self.within(state))
