"""Feedback: a collector that adds a bucket's gradients to what waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradcomp.core.by_host import ByHost
from gradcomp.core.compressor import Acc, Compressor, Layer, Layout, Steps, Traits
from gradcomp.core.requests import World
from gradcomp.engine.buckets import clipping, frozen_layers
from gradcomp.engine.buckets.collector import BucketState, Collector
from gradcomp.engine.buckets.health import INTERVAL, Health, measured
from gradcomp.engine.context import AdamStep, Momentum, StepContext
from gradcomp.engine.optimizers import adam_moments, own_rates, sgd_momentum
from gradcomp.knobs import changed, knob
from gradcomp.native import kernels
from gradcomp.native.extension import MOMENTS
from gradcomp.saved import entry, numbers_of, read_int, table_or_empty, tensor

# The value of momentum that stands for the optimizer's.
AUTO = "auto"
# Stages of a warm-up, each gentler than the compressor itself.
STAGES = 5


@dataclass(frozen=True)
class Feedback(Collector):
    """A collector with error feedback: entries that a step does not send are added to the next step's gradient.

    A momentum m is kept locally, in the velocity u. A step computes u <- m u + g and adds u to the residual v (with nesterov it
    adds g + m u). The wrapped compressor then takes from v. The optimizer's own momentum must not act as well (OwnMomentum).
    With feedback=false nothing waits, as in some papers: the residual only holds what a step is to send.
    """

    feedback: bool = knob(
        True,
        "true: entries not sent wait for the next step; false, the default of what rounds but sign: they are lost",
        default_of=lambda made: made.inner.traits.fed_back,
    )
    momentum: float | str = knob(
        AUTO,
        "local momentum; auto: the optimizer's own, of known SGD or Adam; a number: the optimizer's must then be 0",
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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and not self.set_momentum:
            raise ValueError(f"{self}: nesterov=true needs a momentum above 0; set momentum")
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
    def keeps_residual(self) -> bool:
        return self.feedback

    @property
    def _shares_residuals(self) -> bool:
        """True if what waits of this rank's gradients may lie in another rank's residual."""
        return isinstance(self.inner, ByHost)

    @property
    def set_momentum(self) -> float:
        """The momentum of the spec; 0 where it is the optimizer's."""
        return 0.0 if isinstance(self.momentum, str) else self.momentum

    @property
    def takes_momentum(self) -> bool:
        return self.momentum == AUTO and not self.inner.traits.momentum

    @property
    def traits(self) -> Traits:
        inner = super().traits
        whole_model = inner.whole_model or (self.clip > 0 and self.clip_by == "model")
        rates = "used" if self.feedback and inner.rates == "unused" else inner.rates
        return replace(inner, whole_model=whole_model, momentum=self.set_momentum or inner.momentum, rates=rates)

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

    def init(self, layout: Layout, seed: int) -> BucketState:
        state, layers = super().init(layout, seed), len(layout.names)
        state.velocity = torch.zeros_like(state.residual) if self.set_momentum else None
        if self.inner.traits.moments:
            state.moments = torch.zeros(layers, MOMENTS, dtype=torch.float64, device=layout.device)
        if self.inner.traits.sparse:
            state.peaks = kernels.peaks(layout.total, layout.device)
        if self.feedback and not self._shares_residuals:
            state.health = Health(str(self), layout.names)
        if self.clip > 0:
            state.squares = torch.zeros(layers, dtype=torch.float64, device=layout.device)
        return state

    def save(self, state: BucketState) -> dict[str, Any]:
        sent_in = None if state.sent_in is None else state.sent_in.clone()
        adam = {"adam_steps": state.steps_of_adam(), "noise": state.noise.save()}
        return {"steps": state.steps, "sent_in": sent_in, **adam, "inner": super().save(state)}

    def load(self, state: BucketState, saved: Mapping[str, Any]) -> None:
        state.steps = read_int(saved, "steps")
        state.sent_in = None
        if entry(saved, "sent_in") is not None:
            state.sent_in = tensor(saved, "sent_in", state.residual.shape, dtype=torch.uint8).to(state.residual.device)
        state.adam_steps = read_int(saved, "adam_steps")
        state.noise = state.noise.going_on_from(numbers_of(saved, "noise", 4))
        super().load(state, table_or_empty(saved, "inner"))

    def save_shared(self, state: BucketState) -> dict[str, Any]:
        return {"steps": state.steps, "inner": super().save_shared(state)}

    def load_shared(self, state: BucketState, saved: Mapping[str, Any]) -> None:
        state.steps = saved["steps"]
        super().load_shared(state, saved["inner"])

    def collect(self, grads: Sequence[Tensor], state: BucketState, layout: Layout, context: StepContext) -> Acc:
        taken, frozen, loss_scale = context.momentum(layout), context.frozen(layout), context.loss_scale(layout.device)
        frozen_layers.put_back(state, frozen if taken is None or not taken.seeds else ())
        if state.second is not None and not isinstance(taken, AdamStep):
            adam_moments.forget(state)
        # An update that is larger than its gradients may be too large for float16.
        kept = context.follows_rates and all(grad.dtype != torch.float16 for grad in grads)
        of_residual = own_rates.begin(state, context.own_rates(layout) if kept else None) if self.feedback else 0.0
        frozen_layers.follow_rates(state, of_residual or 1.0)
        momentum, nesterov, adaptive, compares = self.set_momentum, self.nesterov, None, False
        match taken:
            case Momentum(value, ahead):
                momentum, nesterov = value, ahead
                of_residual = sgd_momentum.begin(taken, state, of_residual)
                mask = self._mask(state, state.velocity)
            case AdamStep(beta1):
                momentum, nesterov = beta1, False
                compares = taken.compares and state.noise.begin(state.steps, context.ranks)
                mask = self._mask(state, None)
                adaptive = adam_moments.begin(taken, state)
            case None:
                mask = self._mask(state, state.velocity if momentum else None)
        if state.held is not None:
            mask = self._mask(state, None)  # what waits stays, and no momentum with it
        state.of_residual = of_residual
        frozen_layers.set_aside(state, frozen, grads, of_residual or 1.0)
        scales = None
        if state.squares is not None:
            scales = clipping.scales(grads, state.squares, self.clip, self.clip_by == "model", context)
        if compares and state.velocity is not None and state.second is not None:
            state.noise.before(state.velocity, state.second)
        kernels.accumulate(
            grads,
            state.residual,
            state.velocity,
            state.flag,
            momentum,
            nesterov,
            scales=scales,
            loss_scale=loss_scale,
            moments=state.moments,
            peaks=state.peaks,
            adaptive=adaptive,
            mask=mask if momentum or adaptive else None,
            residual_is_local=not self._shares_residuals,
            of_residual=of_residual,
            memory=context.memory,
        )
        if compares and state.velocity is not None:
            state.noise.after(state.velocity, momentum, state.flag)
        if state.health is not None and (state.steps + 1) % INTERVAL == 0:
            squares = None
            if not (momentum or adaptive):
                squares = torch.zeros(len(grads), dtype=torch.float64, device=state.residual.device)
                kernels.sum_squares(grads, squares, context.memory)
                for factor in (scales, None if loss_scale is None else 1 / loss_scale):
                    squares *= 1 if factor is None else factor.double().square()
            state.health.before(squares, state.flag, state.residual, state.sent_in, state.steps + 1)
        return Acc(state.residual, context.memory, mask, state.flag, state.moments, context.rates(layout), state.peaks)

    def _mask(self, state: BucketState, velocity: Tensor | None) -> kernels.Mask | None:
        """Return what notes the entries that are sent in this step; None if none wait."""
        if not self.feedback or not self.inner_traits.selects:
            return None
        if state.sent_in is None:  # nothing has waited yet
            state.sent_in = torch.full_like(state.residual, state.steps % 256, dtype=torch.uint8)
        return kernels.Mask(velocity, state.sent_in, state.steps + 1)

    def exchange(self, acc: Acc, state: BucketState, world: World) -> Steps:
        inner = self.stage(state.steps)
        state.steps += 1
        steps = inner.exchange(acc, state.inner, world)
        if state.second is not None:
            steps = state.noise.compare(steps, world)
        if state.held is not None:
            return own_rates.held(steps, state)
        if state.health is not None and state.steps % INTERVAL == 0:
            steps = measured(steps, state.health, state.residual)
        return steps

    def stage(self, steps: int) -> Compressor:
        """Choose the compressor after this number of steps: a gentler form during the warm-up, then the wrapped one."""
        if steps >= self.warmup:
            return self.inner
        gentler = self.inner.ease((int(STAGES * steps / self.warmup) + 1) / (STAGES + 1))
        assert gentler is not None
        return gentler


def with_feedback(compressor: Compressor, **settings: Any) -> Compressor:
    """Wrap a compressor in what collects gradients, unless it is exact and none of Feedback's knobs is set."""
    if compressor.traits.outermost or (compressor.traits.exact and not settings):
        return compressor
    return Feedback(compressor, **{"feedback": compressor.traits.fed_back, **settings})
