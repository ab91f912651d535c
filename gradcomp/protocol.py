"""The vocabulary: what a compressor is, what it works on, and what a bucket is made of.

A compressor takes what it sends out of the tensor; what is left in the tensor is the error.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from gradcomp import knobs
from gradcomp.native.memory import Memory, Update
from gradcomp.requests import Asking, World

REGISTRY = "gradcomp.compressors."
"""Where compressors are that a spec can name."""

Steps = Asking[Update]
"""An exchange under way. All ranks yield the same sequence of requests, one at least."""


class Layer(NamedTuple):
    """One parameter: its entries, where they are, and how many dimensions it has."""

    size: int
    device: torch.device
    dims: int = 1


class Layout(NamedTuple):
    """What a bucket is made of: its layers, one after the other in one flat array."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    device: torch.device

    @property
    def total(self) -> int:
        return sum(self.sizes)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Where each layer begins and ends."""
        ends = itertools.accumulate(self.sizes)
        return [(end - size, end) for size, end in zip(self.sizes, ends, strict=True)]

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Each layer's part of the bucket's flat array."""
        return {name: flat[begin:end] for name, (begin, end) in zip(self.names, self.spans, strict=True)}


@dataclass(frozen=True, eq=False)
class Acc:
    """What a compressor works on: the gradient plus the residual, flat, in float32.

    memory: lends updates, and scratch for kernels. velocity: the local momentum, if it is masked where something is taken.
    flag: int32[1], not 0 where a gradient was not finite; None where nobody looked.
    moments: float64[layers, MOMENTS], each layer's statistics, for a compressor that needs them.
    rates: each layer's learning rate, where known. peaks: the largest magnitude in each line of residual, for takes on a CPU.
    """

    residual: Tensor
    memory: Memory
    velocity: Tensor | None = None
    flag: Tensor | None = None
    moments: Tensor | None = None
    rates: tuple[float, ...] | None = None
    peaks: Tensor | None = None


@dataclass(frozen=True)
class Traits:
    """What others must know of a configured compressor.

    whole_model: it wants one bucket for everything, without overlap with backward.
    unbiased: what it sends is right in the mean without error feedback.
    outermost: it brings error feedback along, or chooses who does, so that nothing can go around it.
    moments: which statistics of each layer it reads, of what has accumulated or of the raw gradient.
    sparse: it takes the few largest entries, and peaks tell it where to look. momentum: the momentum that it keeps itself.
    rates: whether it uses or even needs the learning rates.
    ends: the model's first and last layers are treated otherwise than those between.
    """

    whole_model: bool = False
    unbiased: bool = False
    outermost: bool = False
    moments: Literal["accumulated", "raw"] | None = None
    sparse: bool = False
    momentum: float = 0.0
    rates: Literal["unused", "used", "needed"] = "unused"
    ends: bool = False


class Compressor(ABC):
    """Base of all compressors. Subclasses are frozen dataclasses whose fields are the knobs.

    init, exchange and traits make a compressor; the other methods are optional. str() gives the canonical spec, with the knobs
    that differ from their defaults: for what a spec can name, make(str(compressor)) is the same compressor.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.__doc__ = knobs.document(cls)

    def __post_init__(self) -> None:
        knobs.check(self, self.name)

    @property
    def name(self) -> str:
        """The name that a spec has for it: its file's; of a compressor made elsewhere its class's, with the module."""
        kind = type(self)
        known = kind.__module__.startswith(REGISTRY)
        return kind.__module__.removeprefix(REGISTRY).partition(".")[0] if known else f"{kind.__module__}.{kind.__qualname__}"

    def __str__(self) -> str:
        given = knobs.given(self)
        if not type(self).__module__.startswith(REGISTRY):  # no spec can name it, but all that it is must tell it from others
            given = [f"{name}={getattr(self, name)!r}" for name in getattr(type(self), "__dataclass_fields__", {})]
        return ":".join(filter(None, (self.name, ",".join(given))))

    @property
    def traits(self) -> Traits:
        return Traits()

    def init(self, layout: Layout, seed: int) -> Any:
        """Make what one bucket keeps between steps."""
        return None

    @abstractmethod
    def exchange(self, acc: Acc, state: Any, world: World) -> Steps:
        """Take what is sent out of acc.residual; return the mean update over the ranks. What stays there is the error.

        The law: mean(acc.residual before) == mean(acc.residual after) + update.
        """

    def choose(self, name: str, layer: Layer) -> Compressor:
        """Choose the compressor for a layer. Layers whose compressors are equal share buckets."""
        return self

    def ease(self, progress: float) -> Compressor | None:
        """Make a gentler form for warming up: at 0 it would send everything, at 1 it is this one. None if there is none."""
        return None

    def refuses(self, feedback: bool) -> str | None:
        """Say why there must be no error feedback around it (or, asked for False, why there must be); None if there may."""
        return None

    def revise(self, residual: Tensor, velocity: Tensor | None, state: Any, rates: tuple[float, ...]) -> None:
        """Scale what waits, before a gradient is added that will be used with these learning rates."""
        return

    def save(self, state: Any) -> dict[str, Any]:
        """Copy what a checkpoint must hold of the state."""
        return {}

    def load(self, state: Any, saved: Mapping[str, Any]) -> None:
        """Put back what save() gave."""
        return

    def alike(self, state: Any) -> str:
        """Describe what of the state must be the same on all ranks; they compare it before their first exchange."""
        return ""

    def stats(self, state: Any) -> dict[str, Any]:
        """Give figures of the last step."""
        return {}
