"""Wrapper: a compressor around a compressor. Only this file forwards the methods that a wrapper does not change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gradcomp import knobs
from gradcomp.core.compressor import Compressor, Layer, Layout, Traits


@dataclass(frozen=True)
class Wrapper(Compressor):
    """Base of all wrappers. inner is the wrapped compressor; inner_state() finds its state in the wrapper's state."""

    inner: Compressor

    def __post_init__(self) -> None:
        knobs.check(self, self.name)
        if self.inner.traits.outermost:
            raise ValueError(
                f"{type(self).__name__} cannot wrap {self.inner}, which must be outermost; wrap the compressors inside it"
            )

    @property
    def name(self) -> str:
        return self.inner.name

    def __str__(self) -> str:
        head, _, tail = str(self.inner).partition(":")
        return ":".join(filter(None, (head, ",".join(filter(None, (tail, *self.added_knobs()))))))

    def added_knobs(self) -> list[str]:
        """List the knobs that the wrapper adds to the canonical spec."""
        return knobs.changed(self)

    def wrap(self, inner: Compressor) -> Wrapper:
        """Make the same wrapper around another compressor."""
        return replace(self, inner=inner)

    def inner_state(self, state: Any) -> Any:
        """Return the inner compressor's state."""
        return state.inner

    @property
    def traits(self) -> Traits:
        return self.inner.traits

    def choose(self, name: str, layer: Layer) -> Compressor:
        chosen = self.inner.choose(name, layer)
        return self if chosen is self.inner else self.wrap(chosen)

    def misfit(self, names: Sequence[str]) -> str | None:
        return self.inner.misfit(names)

    def ease(self, progress: float) -> Compressor | None:
        gentler = self.inner.ease(progress)
        return None if gentler is None else self.wrap(gentler)

    def init(self, layout: Layout, seed: int) -> Any:
        return self.inner.init(layout, seed)

    def refuses(self, feedback: bool) -> str | None:
        return self.inner.refuses(feedback)

    def save(self, state: Any) -> dict[str, Any]:
        return self.inner.save(self.inner_state(state))

    def load(self, state: Any, saved: Mapping[str, Any]) -> None:
        self.inner.load(self.inner_state(state), saved)

    def save_shared(self, state: Any) -> dict[str, Any]:
        return self.inner.save_shared(self.inner_state(state))

    def load_shared(self, state: Any, saved: Mapping[str, Any]) -> None:
        self.inner.load_shared(self.inner_state(state), saved)

    def stats(self, state: Any) -> dict[str, Any]:
        return self.inner.stats(self.inner_state(state))
