"""SGD's momentum, kept by each rank: gradients go into a velocity, and the velocity goes into the residual."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from gradcomp.core.compressor import Layout
from gradcomp.engine.context import Momentum, StepContext
from gradcomp.engine.stages.stage import Accumulation, Shares, Stage, load_sum
from gradcomp.native.extension import LARGEST


@dataclass
class Velocity:
    """The velocity of a bucket; None until there is a momentum."""

    velocity: Tensor | None = None


@dataclass(frozen=True)
class Sgd(Stage):
    """Computes u <- m u + g for the velocity u, and adds u to the residual; with nesterov g + m u.

    momentum: the spec's; 0: that of an optimizer by SGD, where the exchange has taken it over. residual: entries that are not
    sent stay in the residual.
    """

    name: ClassVar[str] = "sgd"
    fields: ClassVar[tuple[str, ...]] = ("velocity",)
    momentum: float
    nesterov: bool
    residual: bool

    def init(self, layout: Layout, seed: int) -> Velocity:
        return Velocity(torch.zeros(layout.total, device=layout.device) if self.momentum else None)

    def prepare(self, accumulation: Accumulation, state: Velocity, context: StepContext) -> None:
        if self.momentum:
            accumulation.velocity, accumulation.momentum, accumulation.nesterov = state.velocity, self.momentum, self.nesterov
            return
        momentum = context.momentum(accumulation.layout)
        if not isinstance(momentum, Momentum):
            state.velocity = None
            return
        if state.velocity is None:
            state.velocity = torch.zeros_like(accumulation.residual)
        accumulation.velocity = state.velocity
        accumulation.momentum, accumulation.nesterov = momentum.value, momentum.nesterov
        if momentum.seeds or momentum.decays:
            _begin(momentum, state.velocity, accumulation)

    def load(self, state: Velocity, layout: Layout, shares: Shares) -> Callable[[], None]:
        parts = [share.arrays("velocity", layout, optional=not self.momentum) for share in shares.own]
        return partial(load_sum, state, "velocity", layout, parts, shares.factor)

    def scale(self, state: Velocity, factor: float) -> None:
        """Scale the velocity with the residual. Without one it stays, unless ranks have joined."""
        if state.velocity is not None and (self.residual or factor == 0 or factor >= 1):
            state.velocity.mul_(factor).clamp_(-LARGEST, LARGEST)


@torch.no_grad()
def _begin(momentum: Momentum, velocity: Tensor, accumulation: Accumulation) -> None:
    """Prepare the velocity for a step of the optimizer's momentum m and weight decay d.

    The optimizer adds d times the weights to the gradient. Here m times the velocity is added; so d / m times the weights go
    into it before. Nesterov's form adds the gradient once more, which the residual gets.

    An entry with a refused gradient keeps both: the decay of that step acts with its next finite gradient.
    """
    sizes = accumulation.layout.sizes
    velocities = velocity.split(sizes)
    for part, seed in zip(velocities, momentum.seeds or [], strict=False):
        if seed is not None:
            part.copy_(seed[0])
    if momentum.nesterov and momentum.decays:
        accumulation.scale_residual()
    for decay, (layers, weights) in momentum.decays.items():
        _add([velocities[i] for i in layers], weights, decay / momentum.value, momentum.decay_factor)
        if momentum.nesterov:
            residuals = accumulation.residual.split(sizes)
            _add([residuals[i] for i in layers], weights, decay, momentum.decay_factor)


def _add(sums: list[Tensor], weights: list[Tensor], decay: float, factor: Tensor | None) -> None:
    if factor is None:
        torch._foreach_add_(sums, weights, alpha=decay)
        return
    for own, weight in zip(sums, weights, strict=True):
        own.addcmul_(weight, factor, value=decay)
