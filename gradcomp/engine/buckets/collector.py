"""Collectors: what a bucket keeps between steps, and how its gradients become the acc of a step."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gradcomp.core.compressor import Acc, Layout, Steps, Traits
from gradcomp.core.requests import World
from gradcomp.core.wrapper import Wrapper
from gradcomp.engine.buckets.health import Health
from gradcomp.engine.buckets.rank_noise import RankNoise
from gradcomp.engine.context import Rates, StepContext
from gradcomp.native import kernels


@dataclass
class Aside:
    """What was set aside of a layer: its arrays, by name, and its entries in the bucket.

    of_residual: the factor that its residual has had since.
    """

    entries: slice
    arrays: dict[str, Tensor]
    of_residual: float = 1.0


@dataclass
class BucketState:
    """The state that a bucket keeps between steps.

    residual: the residual, flat; during a step the gradients are added to it, and the compressor takes from it.
    flag: int32[1], not 0 where a gradient was not finite. inner: the state of the wrapped compressor. noise: of the gradients.
    velocity: the local momentum. second: Adam's second moment. adam_steps: the steps begun with the two.
    sent_in: the step in which each entry was last sent (kernels.Mask). health: of the residual.
    moments, peaks: statistics that accumulating writes (protocol.Acc). steps: steps begun.
    squares: the sum of squares of each layer's gradient, for clipping. rates: those that what waits is meant for (own_rates).
    held: the residual, in a step whose updates move nothing (own_rates). of_residual: the factor of what waits in this step.
    aside: what was set aside of frozen layers, by their numbers (frozen_layers).
    """

    residual: Tensor
    flag: Tensor
    inner: Any
    noise: RankNoise
    velocity: Tensor | None = None
    moments: Tensor | None = None
    squares: Tensor | None = None
    peaks: Tensor | None = None
    steps: int = 0
    second: Tensor | None = None
    adam_steps: int = 0
    sent_in: Tensor | None = None
    health: Health | None = None
    rates: Rates = None
    held: Tensor | None = None
    of_residual: float = 1.0
    aside: dict[int, Aside] = field(default_factory=dict)

    def steps_of_adam(self) -> int:
        """Return the steps that Adam's moments have seen, without the last one if it was refused. This waits for the device."""
        return max(0, self.adam_steps - int(self.flag))


class Collector(Wrapper):
    """The outermost compressor of a bucket. It also collects the bucket's gradients, and reads each in place."""

    @property
    def traits(self) -> Traits:
        return replace(self.inner.traits, outermost=True)

    @functools.cached_property
    def inner_traits(self) -> Traits:
        """The traits of the wrapped compressor, which makes them anew at every look."""
        return self.inner.traits

    def init(self, layout: Layout, seed: int) -> BucketState:
        residual = torch.zeros(layout.total, device=layout.device)
        flag = torch.zeros(1, dtype=torch.int32, device=layout.device)
        return BucketState(residual, flag, self.inner.init(layout, seed), RankNoise(layout, seed))

    @property
    @abstractmethod
    def keeps_residual(self) -> bool:
        """True if entries that a step does not send wait for the next step."""

    @property
    def unscales(self) -> bool:
        """True if collect() divides gradients by the loss scale."""
        return True

    @property
    def takes_momentum(self) -> bool:
        """True if collect() applies the optimizer's momentum."""
        return False

    @abstractmethod
    def collect(self, grads: Sequence[Tensor], state: BucketState, layout: Layout, context: StepContext) -> Acc:
        """Make the acc of a step from a bucket's gradients and its residual."""


@dataclass(frozen=True)
class NoFeedback(Collector):
    """A collector without error feedback, for exact compressors: each step starts from the gradients alone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inner.traits.fed_back or self.inner.traits.moments:
            raise ValueError(f"{self.inner} needs error feedback; make() adds it")

    @property
    def keeps_residual(self) -> bool:
        return False

    @property
    def unscales(self) -> bool:
        return False  # nothing waits here that a later scale could meet

    def collect(self, grads: Sequence[Tensor], state: BucketState, layout: Layout, context: StepContext) -> Acc:
        kernels.flatten(grads, state.residual)
        return Acc(state.residual, context.memory, rates=context.rates(layout))

    def exchange(self, acc: Acc, state: BucketState, world: World) -> Steps:
        return self.inner.exchange(acc, state.inner, world)
