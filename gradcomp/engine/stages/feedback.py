"""Error feedback: entries that a step does not send stay in the residual, and are added to the next step's gradient.

Feedback is the wrapper that a spec's knobs configure. It lists the stages of a bucket. Residual is the stage that every
accumulation needs, and Clip one that cuts gradients before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradcomp import saved
from gradcomp.core.compressor import Acc, Compressor, Layer, Layout, Steps, Traits
from gradcomp.core.requests import World
from gradcomp.core.wrapper import Wrapper
from gradcomp.engine.context import StepContext
from gradcomp.engine.stages.health import Health, remedy
from gradcomp.engine.stages.stage import Accumulation, Copy, Part, Shares, Stage, load_sum
from gradcomp.engine.updates.hidden_momentum import Momentum
from gradcomp.knobs import changed, knob
from gradcomp.native import kernels
from gradcomp.native.extension import LARGEST, MOMENTS

# The value of momentum that stands for the optimizer's.
AUTO = "auto"
# Stages of a warm-up, each gentler than the compressor itself.
STAGES = 5


@dataclass(frozen=True)
class Feedback(Wrapper):
    """A wrapper with error feedback: entries that a step does not send are added to the next step's gradient.

    The residual acts on updates: each rank's optimizer steps on its own gradient, start minus now goes into the residual, and
    the compressor takes from it. With feedback=false a compressor acts on gradients, and the residual holds those of one step.
    """

    feedback: bool = knob(
        True,
        "send unsent entries in later steps; default false for quantisers except sign",
        default_of=lambda made: made.inner.traits.fed_back,
    )
    momentum: float | str = knob(
        AUTO,
        "momentum that the residual stands for; auto: the optimizer's, which is hidden; a number: in its place; 0: none",
        least=0,
        below=1,
        word=AUTO,
    )
    nesterov: bool = knob(False, "Nesterov's form of a momentum that is a number")
    clip: float = knob(0.0, "each rank's own gradient is cut to a norm of clip / sqrt(ranks); 0 = off", least=0)
    clip_by: str = knob(
        "layer", "norm of each layer, or of the model; model needs one bucket, without overlap", choices=("layer", "model")
    )
    warmup: int = knob(0, "steps with gentler compression, in five stages; 0 = none", least=0)
    decay: float = knob(1.0, "factor of the residual in each step; below 1, entries that wait fade", above=0, most=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and not self.set_momentum:
            raise ValueError(f"{self}: nesterov=true needs a momentum above 0; set momentum")
        if self.decay != 1 and not self.feedback:
            raise ValueError(f"{self}: decay acts on a residual that is kept; write feedback=true, or leave decay out")
        if self.warmup and self.inner.ease(0.5) is None:
            raise ValueError(f"{self}: {self.name} has no gentler form to warm up with; leave warmup out")
        kept = self.inner.traits.momentum
        if self.set_momentum and kept:
            raise ValueError(
                f"{self}: momentum={self.momentum} acts on top of {self.inner}'s own momentum {kept}; leave momentum out"
            )
        if reason := self.inner.refuses(self.feedback):
            raise ValueError(f"{self}: {reason}")

    def added_knobs(self) -> list[str]:
        """List the knobs that differ from their defaults. The default of feedback is the compressor's."""
        differs = [each for each in changed(self) if not each.startswith("feedback=")]
        given = [] if self.feedback == self.inner.traits.fed_back else [f"feedback={str(self.feedback).lower()}"]
        return given + differs

    @property
    def set_momentum(self) -> float:
        """The momentum of the spec; 0 where it is the optimizer's."""
        return 0.0 if isinstance(self.momentum, str) else self.momentum

    @property
    def residual_factor(self) -> float:
        """The factor of the old residual in a step."""
        return self.decay if self.feedback else 0.0

    @property
    def given_momentum(self) -> Momentum | None:
        """The momentum in place of the optimizer's; None: the optimizer's own.

        An algorithm with a momentum of its own hides the optimizer's, and momentum=0 leaves it to the optimizer.
        """
        if self.inner.traits.momentum and self.momentum != 0:
            return Momentum()
        if isinstance(self.momentum, str):
            return None
        return Momentum(self.momentum, self.nesterov, hides=self.momentum > 0)

    @property
    def traits(self) -> Traits:
        inner = super().traits
        whole_model = inner.whole_model or (self.clip > 0 and self.clip_by == "model")
        momentum = self.set_momentum or inner.momentum
        acts_on_updates = self.feedback or momentum > 0 or inner.coarse
        return replace(inner, whole_model=whole_model, momentum=momentum, acts_on_updates=acts_on_updates, outermost=True)

    def choose(self, name: str, layer: Layer) -> Compressor:
        if self.traits.whole_model:  # a norm or an algorithm over all layers keeps them together
            return self
        chosen = self.inner.choose(name, layer)
        if chosen is self.inner:
            return self
        # Feedback takes over the momentum that the algorithm keeps and this layer's compressor does not.
        kept = self.inner.traits.momentum
        momentum = kept if kept and not chosen.traits.momentum else self.momentum
        return replace(self, inner=chosen, momentum=momentum, warmup=0 if chosen.ease(0.5) is None else self.warmup)

    def inner_state(self, state: Any) -> Any:
        return state

    def exchange(self, acc: Acc, state: Any, world: World) -> Steps:
        return self.inner.exchange(acc, state, world)

    def compressor_after(self, steps: int) -> Compressor:
        """Choose the compressor after this number of steps: a gentler form during the warm-up, then the wrapped one."""
        if steps >= self.warmup:
            return self.inner
        gentler = self.inner.ease((int(STAGES * steps / self.warmup) + 1) / (STAGES + 1))
        assert gentler is not None
        return gentler

    def stages(self) -> list[Stage]:
        """List the stages of a bucket, in the order in which they prepare."""
        traits = self.inner.traits
        stages: list[Stage] = [Residual(self.feedback or self.set_momentum > 0, traits)]
        if self.clip > 0:
            stages.append(Clip(self.clip, self.clip_by == "model"))
        if self.feedback and not traits.shares_residual:
            stages.append(Health(str(self), remedy(self.inner)))
        return stages

    def stages_of_updates(self) -> list[Stage]:
        """List the stages of a bucket that exchanges updates: the residual stays, since it stands for the momentum, too."""
        return [Residual(True, self.inner.traits), *(each for each in self.stages() if isinstance(each, Health))]


def with_feedback(compressor: Compressor, **settings: Any) -> Compressor:
    """Wrap a compressor in Feedback, unless it is exact and none of Feedback's knobs is set."""
    if compressor.traits.outermost or (compressor.traits.exact and not settings):
        return compressor
    return Feedback(compressor, **{"feedback": compressor.traits.fed_back, **settings})


@dataclass
class ResidualState:
    """The arrays of every bucket with feedback.

    residual: flat; what was not sent. flag: int32[1], not 0 where a gradient was not finite. ages: of updates, the steps since
    each entry was last sent. moments, peaks: statistics that accumulating writes (Acc).
    """

    residual: Tensor
    flag: Tensor
    ages: Tensor | None = None
    moments: Tensor | None = None
    peaks: Tensor | None = None


@dataclass(frozen=True)
class Residual(Stage):
    """Keeps the residual.

    keeps: from step to step. traits: the compressor's.
    """

    name: ClassVar[str] = "feedback"
    fields: ClassVar[tuple[str, ...]] = ("residual",)
    keeps: bool
    traits: Traits

    def init(self, layout: Layout, seed: int) -> ResidualState:
        state = ResidualState(
            torch.zeros(layout.total, device=layout.device), torch.zeros(1, dtype=torch.int32, device=layout.device)
        )
        if self.traits.moments:
            state.moments = torch.zeros(len(layout.names), MOMENTS, dtype=torch.float64, device=layout.device)
        state.peaks = kernels.peaks(layout.total, layout.device, self.traits.share_by_peaks, self.traits.moments)
        return state

    def prepare(self, accumulation: Accumulation, state: ResidualState, context: StepContext) -> None:
        accumulation.moments, accumulation.peaks = state.moments, state.peaks

    def save(self, state: ResidualState, layout: Layout, copy: Copy) -> Part:
        if not self.keeps:
            return Part()
        ages = {} if state.ages is None else {"ages": {name: copy(each) for name, each in layout.views(state.ages).items()}}
        return Part({**super().save(state, layout, copy).layers, **ages})

    def load(self, state: ResidualState, layout: Layout, shares: Shares) -> Callable[[], None]:
        parts = [share.arrays("residual", layout) for share in shares.own] if self.keeps else []
        ages = self._ages(layout, shares) if self.keeps else None

        def copy() -> None:
            state.ages = ages
            state.flag.zero_()
            if self.keeps:
                load_sum(state, "residual", layout, parts, shares.factor)

        return copy

    def _ages(self, layout: Layout, shares: Shares) -> Tensor | None:
        """Return the ages of the first share. A residual without any has waited for long: the next send is a whole one."""
        found: dict[str, Tensor] = {}
        for share in shares.own[:1]:
            theirs = saved.table_or_empty(share.layers, "ages")
            for name, size in zip(layout.names, layout.sizes, strict=True):
                if name in theirs:
                    what = f"{share.prefix}the ages of {name!r}"
                    found[name] = saved.tensor(theirs, name, (size,), dtype=torch.uint8, what=what)
        if not found:
            return None
        ages = torch.full((layout.total,), 255, dtype=torch.uint8, device=layout.device)
        waiting = saved.table_or_empty(shares.own[0].layers, "residual")
        for name, view in layout.views(ages).items():
            if name in found:
                view.copy_(found[name])
            elif name not in waiting or not waiting[name].any():
                view.zero_()
        return ages

    def scale(self, state: ResidualState, factor: float) -> None:
        if self.keeps:
            state.residual.mul_(factor).clamp_(-LARGEST, LARGEST)


def cut_factors(bound: float | Tensor, squares: Tensor, whole_model: bool) -> Tensor:
    """Return the factors that cut gradients to a bound, as torch computes them. squares: the sum of each layer's.

    A layer with an entry that is not finite has no norm. Its finite entries go to the residual.
    """
    squares.nan_to_num_(0.0, 0.0, 0.0)
    norms = squares.sum().sqrt().expand_as(squares) if whole_model else squares.sqrt()
    return (bound / (norms + 1e-6)).clamp(max=1).float()


@dataclass(frozen=True)
class Clip(Stage):
    """Cuts each layer's gradient to norm / sqrt(ranks). The state holds the sum of squares of each layer.

    whole_model: all layers count as one.
    """

    name: ClassVar[str] = "clip"
    norm: float
    whole_model: bool

    def init(self, layout: Layout, seed: int) -> Tensor:
        return torch.zeros(len(layout.names), dtype=torch.float64, device=layout.device)

    def prepare(self, accumulation: Accumulation, state: Tensor, context: StepContext) -> None:
        kernels.sum_squares(accumulation.grads, state, accumulation.memory)
        accumulation.scales = cut_factors(self.norm / math.sqrt(context.world.size), state, self.whole_model)
