"""A stage of a bucket, the accumulation that stages fill in, and a stage's part of a saved state."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from gradcomp import saved
from gradcomp.core.compressor import Acc, Layout, Steps
from gradcomp.core.requests import World
from gradcomp.engine.context import Decays, Rates, StepContext
from gradcomp.native import kernels
from gradcomp.native.extension import LARGEST
from gradcomp.native.memory import Memory

# Copies a layer's array for a saved state.
Copy = Callable[[Tensor], Tensor]


@dataclass(eq=False)
class Accumulation:
    """The arguments of the one call of kernels.accumulate that adds a bucket's gradients to its residual. Stages fill it in.

    step: the number of the bucket's step, from 1. residual_factor: of the old residual; 0 where the step sends nothing of
    it. layer_factors: by number, of the layers with other factors, which their residuals have already, but for the decay of
    the spec. residual_is_scaled: the old residual has its factor already. residual_is_kept: the step sends none of it, and it
    comes back after the step. dropped: a stage has emptied the residual for good. idle: the numbers of layers without a
    gradient on this rank: frozen, or unused in this step. decays: of the weights to add to the gradients.
    """

    grads: Sequence[Tensor]
    layout: Layout
    residual: Tensor
    flag: Tensor
    memory: Memory
    step: int
    loss_scale: Tensor | None = None
    residual_factor: float = 1.0
    layer_factors: Mapping[int, float] = field(default_factory=dict)
    residual_is_scaled: bool = False
    residual_is_local: bool = True
    residual_is_kept: bool = False
    dropped: bool = False
    velocity: Tensor | None = None
    momentum: float = 0.0
    nesterov: bool = False
    adaptive: kernels.Adaptive | None = None
    others: Mapping[int, kernels.Adaptive] | None = None
    idle: Collection[int] = ()
    decays: Decays = field(default_factory=dict)
    scales: Tensor | None = None
    moments: Tensor | None = None
    peaks: Tensor | None = None
    mask: kernels.Mask | None = None
    undone: int = 0

    def drop_residual(self) -> None:
        """Empty the residual for good: it holds another quantity than the step adds."""
        self.residual.zero_()
        self.dropped = True

    def scale_residual(self) -> None:
        """Multiply the old residual by its factor before run(), for a stage that adds to it."""
        if self.residual_factor != 1:
            self.residual.mul_(self.residual_factor).clamp_(-LARGEST, LARGEST)
            self.residual_is_scaled = True

    @property
    def adds_gradients(self) -> bool:
        """True if the step adds gradients to the residual; False if it adds velocities or directions."""
        return not (self.momentum or self.adaptive)

    def run(self) -> None:
        """Add the gradients to the residual, in one native call, behind another where weights are added to them."""
        grads, scales, loss_scale = (self._decayed(), None, None) if self.decays else (self.grads, self.scales, self.loss_scale)
        kernels.accumulate(
            grads,
            self.residual,
            self.velocity,
            self.flag,
            self.momentum,
            self.nesterov,
            scales=scales,
            loss_scale=loss_scale,
            moments=self.moments,
            peaks=self.peaks,
            adaptive=self.adaptive,
            others=self.others,
            mask=None if self.adds_gradients else self.mask,
            residual_is_local=self.residual_is_local,
            residual_factor=1.0 if self.residual_is_scaled else self.residual_factor,
            memory=self.memory,
        )

    @torch.no_grad()
    def _decayed(self) -> Sequence[Tensor]:
        """Copy the gradients, without the loss scale and cut, and add the decaying weights to the copies."""
        flat: Tensor = self.memory.scratch("decayed", self.layout.total, self.residual, "float32")
        kernels.flatten(self.grads, flat)
        if self.loss_scale is not None:
            flat.div_(self.loss_scale)
        copies = [*flat.split(self.layout.sizes)]
        if self.scales is not None:
            torch._foreach_mul_(copies, [*self.scales.unbind()])
        for decay, (layers, weights) in self.decays.items():
            if layers:
                torch._foreach_add_([copies[layer] for layer in layers], weights, alpha=decay)
        return copies

    def acc(self, rates: Rates, frozen: Sequence[int]) -> Acc:
        """Return the acc that the compressor takes from. frozen: the numbers of frozen layers."""
        spans = self.layout.spans_of(frozen) if frozen else ()
        return Acc(self.residual, self.memory, self.mask, self.flag, self.moments, rates, self.peaks, spans)


def squares_of(grads: Sequence[Tensor], loss_scale: Tensor | None, memory: Memory) -> Tensor:
    """Sum the squares of each gradient, without the loss scale."""
    squares = torch.zeros(len(grads), dtype=torch.float64, device=grads[0].device)
    kernels.sum_squares(grads, squares, memory)
    return squares if loss_scale is None else squares.mul_((1 / loss_scale).double().square())


def tensor_on(device: torch.device, numbers: Sequence[Any]) -> Tensor:
    """Make a tensor of a few numbers on a device. A GPU is not waited for."""
    return torch.tensor(numbers).to(device, non_blocking=device.type != "cpu")


def cut_factors(bound: float | Tensor, norms: Tensor) -> Tensor:
    """Return the factors that cut gradients of these norms to a bound, as torch computes them. bound: one, or one of each."""
    return (bound / (norms + 1e-6)).clamp(max=1).float()


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

    own: of the residuals that the rank takes over. others: those of all ranks, for a rank that takes over none.
    factor: for the sum of residuals.
    """

    own: Sequence[Share]
    others: Sequence[Share] = ()
    factor: float = 1.0


class Stage(ABC):
    """One stage between a bucket's gradients and its compressor.

    A stage fills in its arguments of the accumulation. It owns its part of the bucket's state, and of a saved state: a
    saved field is added in the stage's file, and FORMAT of engine/state counts it.

    name: of its part. fields: the flat arrays of its state, which may be None; each is saved by layer.
    """

    name: ClassVar[str]
    fields: ClassVar[tuple[str, ...]] = ()

    def init(self, layout: Layout, seed: int) -> Any:
        """Make the stage's part of a bucket's state."""
        return None

    def prepare(self, accumulation: Accumulation, state: Any, context: StepContext) -> None:
        """Fill in arguments of the accumulation."""
        return

    def after(self, accumulation: Accumulation, state: Any, context: StepContext) -> None:
        """Look at the result of the accumulation."""
        return

    def around(self, steps: Steps, accumulation: Accumulation, state: Any, world: World) -> Steps:
        """Return the exchange, with the stage's requests before it or its work after it."""
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
