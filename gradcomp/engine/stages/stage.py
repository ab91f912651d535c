"""A stage of a bucket, the accumulation that stages fill in, and a stage's part of a saved state."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from gradcomp import saved
from gradcomp.core.compressor import Acc, Layout, Steps
from gradcomp.engine.context import StepContext
from gradcomp.native import kernels
from gradcomp.native.extension import LARGEST
from gradcomp.native.memory import Memory

# Copies a layer's array for a saved state.
Copy = Callable[[Tensor], Tensor]


@dataclass(eq=False)
class Accumulation:
    """The arguments of the one call of kernels.accumulate that adds a bucket's gradients to its residual. Stages fill it in.

    residual_factor: of the old residual; 0 where nothing of it stays.
    """

    grads: Sequence[Tensor]
    layout: Layout
    residual: Tensor
    flag: Tensor
    memory: Memory
    residual_factor: float = 1.0
    scales: Tensor | None = None
    moments: Tensor | None = None
    peaks: Tensor | None = None

    def run(self) -> None:
        """Add the gradients to the residual, in one native call."""
        kernels.accumulate(
            self.grads,
            self.residual,
            self.flag,
            scales=self.scales,
            moments=self.moments,
            peaks=self.peaks,
            residual_factor=self.residual_factor,
            memory=self.memory,
        )

    @torch.no_grad()
    def cut(self) -> Sequence[Tensor]:
        """Copy the gradients to scratch, cut by their scales."""
        flat: Tensor = self.memory.scratch("gradients", self.layout.total, self.residual, "float32")
        kernels.flatten(self.grads, flat)
        copies: Sequence[Tensor] = flat.split(self.layout.sizes)
        if self.scales is not None:
            torch._foreach_mul_([*copies], [*self.scales.unbind()])
        return copies

    def acc(self, rates: tuple[float, ...] | None, frozen: Sequence[int]) -> Acc:
        """Return the acc that the compressor takes from. frozen: the numbers of frozen layers."""
        spans = self.layout.spans_of(frozen) if frozen else ()
        return Acc(self.residual, self.memory, None, self.flag, self.moments, rates, self.peaks, spans)


class Part(NamedTuple):
    """A stage's part of a saved state. layers: by field, then by layer. bucket: the rest."""

    layers: Mapping[str, Mapping[str, Any]] = {}
    bucket: Mapping[str, Any] = {}


class Share(NamedTuple):
    """A stage's part of one rank's share, as a bucket loads it.

    layers: by field, then by layer, of the whole model. bucket: None where the share has no bucket of the same layers.
    trusted: it comes from this process, and need not be finite. partial: layers may be missing, since another spec kept it.
    prefix: of messages.
    """

    layers: Mapping[str, Any]
    bucket: Mapping[str, Any] | None
    trusted: bool = False
    partial: bool = False
    prefix: str = ""

    def arrays(self, field: str, layout: Layout, *, optional: bool = False) -> dict[str, Tensor]:
        """Return a field's arrays of a bucket's layers. Refuse those that do not fit, are not finite, or are missing.

        optional: arrays may be missing.
        """
        theirs, arrays = saved.table_or_empty(self.layers, field), {}
        for name, size in zip(layout.names, layout.sizes, strict=True):
            what = f"{self.prefix}the {field} of {name!r}"
            if name in theirs:
                arrays[name] = saved.tensor(theirs, name, (size,), dtype=torch.float32, finite=not self.trusted, what=what)
            elif not (optional or self.partial):
                raise ValueError(f"{what} is not in the state: the state is damaged; load another one")
        return arrays


class Shares(NamedTuple):
    """The shares that a bucket's stage loads.

    own: of the residuals that the rank takes over. factor: for the sum of residuals.
    """

    own: Sequence[Share]
    factor: float = 1.0


class Stage(ABC):
    """One stage between a bucket's gradients and its compressor.

    A stage fills in its arguments of the accumulation. It owns its part of the bucket's state, and of a saved state: a
    saved field is added in the stage's file, and FORMAT of engine/state counts it.

    name: of its part. fields: the flat arrays of its state, which may be None; each is saved by layer. interval: around() acts
    in one step of so many; 0: in none.
    """

    name: ClassVar[str]
    interval: ClassVar[int] = 0
    fields: ClassVar[tuple[str, ...]] = ()

    def init(self, layout: Layout, seed: int) -> Any:
        """Make the stage's part of a bucket's state."""
        return None

    def prepare(self, accumulation: Accumulation, state: Any, context: StepContext) -> None:
        """Fill in arguments of the accumulation."""
        return

    def around(self, steps: Steps, acc: Acc, state: Any) -> Steps:
        """Return an exchange with the stage's work before it and after it."""
        return steps

    def arrays(self, state: Any) -> list[Tensor]:
        """List the flat arrays that may move weights in a later step. Those of frozen layers are set aside."""
        return [array for field in self.fields if (array := getattr(state, field)) is not None]

    def save(self, state: Any, layout: Layout, copy: Copy) -> Part:
        """Return the stage's part of a saved state. copy: copies an array of a layer."""
        views = {field: layout.views(array) for field in self.fields if (array := getattr(state, field)) is not None}
        return Part({field: {name: copy(view) for name, view in of_field.items()} for field, of_field in views.items()})

    def load(self, state: Any, layout: Layout, shares: Shares) -> Callable[[], None]:
        """Check the stage's part of saved states. Return a function that loads it, which cannot fail."""
        return lambda: None

    def carry(self, state: Any, layout: Layout, before: Share) -> None:
        """Take the layers over that a bucket of another spec has kept."""
        if not self.fields or any(before.layers.get(field, {}).keys() & {*layout.names} for field in self.fields):
            self.load(state, layout, Shares([before]))()

    def scale(self, state: Any, factor: float) -> None:
        """Follow a change of the number of ranks: the residual is multiplied by the factor. A factor of 0 resets all."""
        return


def load_sum(state: Any, field: str, layout: Layout, parts: Sequence[Mapping[str, Tensor]], factor: float) -> None:
    """Set each layer of a field to the sum of its parts, times the factor. A field of None is made where there are parts."""
    if getattr(state, field) is None:
        if not any(parts):
            return
        setattr(state, field, torch.zeros(layout.total, device=layout.device))
    for name, view in layout.views(getattr(state, field)).items():
        view.zero_()
        for part in parts:
            if name in part:
                view.add_(part[name].to(view.device), alpha=factor).clamp_(-LARGEST, LARGEST)
