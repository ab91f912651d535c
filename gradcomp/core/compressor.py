"""The vocabulary: compressors, the arrays that they work on, and the layers of a bucket.

A compressor takes the entries that it sends out of the residual. The rest of the residual is the error.
"""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from gradcomp import knobs
from gradcomp.core.requests import Requests, World
from gradcomp.native.memory import Memory, Update

# The package of the compressors that a spec can name.
REGISTRY = "gradcomp.compressors."

# An exchange: a generator that yields requests and returns the update. All ranks yield the same requests, at least one.
Steps = Requests[Update]


class Layer(NamedTuple):
    """One parameter.

    Attributes:
        size: Its number of entries.
        device: The device that it is on.
        dims: Its number of dimensions.
    """

    size: int
    device: torch.device
    dims: int = 1


class Layout(NamedTuple):
    """The layers of a bucket, one after the other in one flat array.

    Attributes:
        names: The names of the layers.
        sizes: Their numbers of entries.
        device: The device that they are on.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    device: torch.device

    @property
    def total(self) -> int:
        return sum(self.sizes)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Return the first entry of each layer, and the first one behind it."""
        ends = itertools.accumulate(self.sizes)
        return [(end - size, end) for size, end in zip(self.sizes, ends, strict=True)]

    def spans_of(self, layers: Iterable[int]) -> tuple[tuple[int, int], ...]:
        """Return the spans of some layers, in order. Neighbours become one."""
        joined: list[tuple[int, int]] = []
        every = self.spans
        for begin, end in (every[layer] for layer in layers):
            joined.append((joined.pop()[0] if joined and joined[-1][1] == begin else begin, end))
        return tuple(joined)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Slice the bucket's flat array into layers, by name."""
        return {name: flat[begin:end] for name, (begin, end) in zip(self.names, self.spans, strict=True)}


@dataclass(frozen=True, eq=False)
class Acc:
    """The accumulator that a compressor works on. One bucket has one acc in each step.

    Attributes:
        residual: What a compressor takes from, flat, in float32: a gradient, or an offer of the residual. What it leaves is the
            error.
        memory: Lends updates, and scratch to kernels.
        ages: uint8, of each entry; 0 is written where it is sent. None if no momentum needs them.
        flag: int32[1], not 0 if a gradient was not finite; None if gradients were not checked.
        moments: float64[layers, MOMENTS], the statistics of each layer, if the compressor's traits ask for them.
        rates: The learning rate of each layer; None if no optimizer is known.
        frozen: The spans of entries that this rank's frozen layers have. They are zeros.
        agreed: bool, False where ranks whose sum this is have frozen others; None: it is of one rank.
    """

    residual: Tensor
    memory: Memory
    ages: Tensor | None = None
    flag: Tensor | None = None
    moments: Tensor | None = None
    rates: tuple[float, ...] | None = None
    frozen: tuple[tuple[int, int], ...] = ()
    agreed: Tensor | None = None

    @property
    def frozen_number(self) -> int:
        """Number the frozen entries: 31 bits; 0 for none."""
        return zlib.crc32(repr(self.frozen).encode()) & 0x7FFFFFFF or 1 if self.frozen else 0


@dataclass(frozen=True)
class Traits:
    """The properties of a configured compressor that the engine must know.

    Attributes:
        whole_model: It needs all layers in one bucket, so that its exchange does not overlap with backward.
        exact: Its updates are means, but for a rounding far below their noise: error feedback and a local momentum have no use.
        stock: Its exchange is that of torch or Horovod, of gradients as they are, and may be left to them.
        coarse: Its rounding leaves so large an error that an optimizer trains worse with gradients so rounded than where its
            updates are: Adam's second moment then holds the error.
        fed_back: By default it has error feedback.
        acts_on_updates: It acts on updates, after the optimizer's step, and not on gradients: something waits in a residual, or
            it is coarse.
        outermost: It contains the error feedback, or chooses a compressor that does. No wrapper can go around it.
        moments: It reads statistics of each layer of the residual.
        selects: It sends some entries in a step and leaves the others.
        share: That of the entries which it sends in a step, as its knobs say; 0 if they say none.
        momentum: The momentum that it keeps itself.
        rates: It uses the learning rates if they are known, or it needs them.
        ends: It treats the model's first and last layers differently from the others.
        shares_residual: A part of a rank's residual may lie on another rank.
        learns: It sends other messages once it has learned, so that the time of some steps does not show that of the others.
    """

    whole_model: bool = False
    exact: bool = False
    stock: bool = False
    coarse: bool = False
    fed_back: bool = True
    acts_on_updates: bool = False
    outermost: bool = False
    moments: bool = False
    selects: bool = False
    share: float = 0.0
    momentum: float = 0.0
    rates: Literal["unused", "used", "needed"] = "unused"
    ends: bool = False
    shares_residual: bool = False
    learns: bool = False


class Compressor(ABC):
    """Base of all compressors. Subclasses are frozen dataclasses with the knobs as fields.

    A subclass must define exchange(); every other method has a default. str() gives the canonical spec: the name, and the knobs
    that differ from their defaults. make(str(compressor)) is the same compressor if a spec can name it.

    Attributes:
        for_auto: Specs among which auto may choose, by the loss that it must be allowed: none, low or high.
        known_as: Specs by the words that Horovod and torch have for them.
        suits: The training for which README recommends it; empty if for none.
        also: Other names of knobs, in specs.

    Examples:
        A compressor that sends a share of the entries as they are, with gradcomp's routes:

            @dataclass(frozen=True)
            class TopK(Compressor):
                ratio: float = knob(0.01, "share of entries sent", above=0, most=1)

                def exchange(self, acc, state, world):
                    taken = routes.take(acc, count_of(self.ratio, acc.residual.numel()), "exact", "allgather")
                    return (yield from routes.exchange(acc, taken, world, "allgather"))
    """

    for_auto: ClassVar[Mapping[str, Sequence[str]]] = {}
    known_as: ClassVar[Mapping[str, str]] = {}
    suits: ClassVar[str] = ""
    also: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.__doc__ = knobs.document(cls)

    def __post_init__(self) -> None:
        knobs.check(self, self.name)

    @property
    def name(self) -> str:
        """Return the name for specs: the compressor's file name, or its class's dotted name if a user defined it."""
        kind = type(self)
        if not kind.__module__.startswith(REGISTRY):
            return f"{kind.__module__}.{kind.__qualname__}"
        return kind.__module__.removeprefix(REGISTRY).partition(".")[0]

    def __str__(self) -> str:
        settings = knobs.changed(self)
        if not type(self).__module__.startswith(REGISTRY):  # no spec can name it: all fields tell it from others of its class
            own: Sequence[Any] = dataclasses.fields(self) if dataclasses.is_dataclass(self) else ()
            settings = [f"{field.name}={getattr(self, field.name)!r}" for field in own]
        return ":".join(filter(None, (self.name, ",".join(settings))))

    @property
    def traits(self) -> Traits:
        return Traits()

    def init(self, layout: Layout, seed: int) -> Any:
        """Make the state that one bucket keeps between steps.

        Args:
            layout: The layers of the bucket.
            seed: The seed of random numbers, the same on all ranks.

        Returns:
            Any object; exchange() gets it in every step.
        """
        return None

    @abstractmethod
    def exchange(self, acc: Acc, state: Any, world: World) -> Steps:
        """Move the entries that it sends out of acc.residual. Return the mean update over the ranks. The rest is the error.

        The law of conservation: mean(acc.residual before) == mean(acc.residual after) + update.

        Args:
            acc: The accumulator of the bucket. The exchange changes its residual in place.
            state: The bucket's state, from init().
            world: The ranks.

        Yields:
            Requests to the network. All ranks yield the same ones, at least one.

        Returns:
            The update, the same bits on all ranks.
        """

    def choose(self, name: str, layer: Layer) -> Compressor:
        """Choose the compressor for a layer. Layers with equal compressors share buckets."""
        return self

    def misfit(self, names: Sequence[str]) -> str | None:
        """Name the part of the compressor that fits none of these layers, and say why. Return None if all parts fit."""
        return None

    def ease(self, progress: float) -> Compressor | None:
        """Make a gentler form for a warm-up, or None if there is none. At progress 0 it sends all, at 1 it is this one."""
        return None

    def refuses(self, feedback: bool) -> str | None:
        """Explain why the setting feedback=`feedback` is refused. Return None if it is allowed."""
        return None

    def save(self, state: Any) -> dict[str, Any]:
        """Copy the part of the state that a checkpoint must hold: numbers, texts, None and tensors in dicts and lists."""
        return {}

    def load(self, state: Any, saved: Mapping[str, Any]) -> None:
        """Restore a new state from the result of save(). Refuse values that save() cannot have given."""
        return

    def save_shared(self, state: Any) -> dict[str, Any]:
        """Copy the part of the state that all ranks must share, as save() does. They compare it before they exchange."""
        return {}

    def load_shared(self, state: Any, saved: Mapping[str, Any]) -> None:
        """Adopt the shared part of another rank's state. A state that has done no step yet belongs to a rank that joins."""
        return

    def stats(self, state: Any) -> dict[str, Any]:
        """Return figures of the last step."""
        return {}
