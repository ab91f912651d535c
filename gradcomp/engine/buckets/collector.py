"""Collectors: what a bucket keeps between steps, and how its gradients become the acc of a step."""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradcomp.core.compressor import Acc, Layout, Steps, Traits
from gradcomp.core.requests import World
from gradcomp.core.wrapper import Wrapper
from gradcomp.engine.buckets.health import Health
from gradcomp.engine.buckets.rank_noise import RankNoise
from gradcomp.native import kernels
from gradcomp.native.memory import Memory

# The learning rate of each layer; None where no optimizer is known.
Rates = tuple[float, ...] | None
# In place of a layer's rate: nobody knows it; nothing waits of the layer, and any rate will do.
UNKNOWN, ANY = -1.0, math.inf
# By weight decay: the numbers of the layers that it acts on, and their weights in the order of entries.
Decays = Mapping[float, tuple[list[int], list[Tensor]]]


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


class Momentum(NamedTuple):
    """The optimizer's momentum in a step of a bucket, which its velocity is to apply.

    sizes: of the layers. seeds: for each layer what the velocity is to continue from, or None; None if there are none at all.
    """

    value: float
    nesterov: bool
    sizes: Sequence[int]
    seeds: Sequence[Tensor | None] | None
    decays: Decays


class AdamStep(NamedTuple):
    """The settings of Adam's moments in a step of a bucket.

    share: what a direction is multiplied by. sizes: of the layers. seeds: for each layer both moments that its own are to
    continue from, or None; None if there are none at all. steps: the steps that the seeds have seen. skipped: the optimizer
    skipped the last step, since a gradient was not finite. compares: all ranks know Adam, and may compare their noise.
    """

    beta1: float
    beta2: float
    epsilon: float
    share: float
    sizes: Sequence[int]
    seeds: Sequence[tuple[Tensor, ...] | None] | None
    steps: int
    skipped: bool
    compares: bool = True


class StepFacts(NamedTuple):
    """What a bucket's step depends on, beside its gradients and its state.

    memory: the lender of scratch. ranks: the number of ranks in the exchange. rates: the learning rate of each layer.
    loss_scale: what the loss was multiplied by, as one float on the bucket's device. momentum: the optimizer's, for
    momentum=auto. own_rates: the rates that what waits is to keep; None where the optimizer would not bear it.
    frozen: the numbers of the layers that are frozen.
    """

    memory: Memory
    ranks: int
    rates: Rates = None
    loss_scale: Tensor | None = None
    momentum: Momentum | AdamStep | None = None
    own_rates: Rates = None
    frozen: Sequence[int] = ()


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
    def collect(self, grads: Sequence[Tensor], state: BucketState, step: StepFacts) -> Acc:
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

    def collect(self, grads: Sequence[Tensor], state: BucketState, step: StepFacts) -> Acc:
        kernels.flatten(grads, state.residual)
        return Acc(state.residual, step.memory, rates=step.rates)

    def exchange(self, acc: Acc, state: BucketState, world: World) -> Steps:
        return self.inner.exchange(acc, state.inner, world)
