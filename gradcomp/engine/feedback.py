"""Error feedback: entries that a step does not send stay in the residual, and are added to the next step's update.

Feedback is the wrapper that a spec's knobs configure. What it keeps is in engine/updates/progress.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradcomp.core.compressor import Acc, Compressor, Layer, Steps, Traits
from gradcomp.core.requests import World
from gradcomp.core.wrapper import Wrapper
from gradcomp.engine.updates.hidden_momentum import Momentum
from gradcomp.knobs import changed, knob

# The value of momentum that stands for the optimizer's.
AUTO = "auto"
# Stages of a warm-up, each gentler than the compressor itself.
STAGES = 5


@dataclass(frozen=True)
class Feedback(Wrapper):
    """A wrapper with error feedback: entries that a step does not send wait in the residual, and are offered in later steps.

    The residual acts on updates: each rank's optimizer steps on its own gradient, start minus now goes into the residual, and
    the compressor takes from it. With feedback=false a compressor acts on gradients, and the residual holds those of one step.
    """

    feedback: bool = knob(
        True,
        "keep what is not sent for later steps; default false for quantizers except sign",
        default_of=lambda made: made.inner.traits.fed_back,
    )
    momentum: float | str = knob(
        AUTO,
        "auto: the residual applies the optimizer's momentum; a number: this instead; 0: the optimizer keeps its own",
        least=0,
        below=1,
        word=AUTO,
    )
    nesterov: bool = knob(False, "Nesterov's form; only where momentum is a number")
    clip: float = knob(0.0, "clip each rank's own gradient to a norm of clip / sqrt(ranks); 0 = off", least=0)
    clip_by: str = knob(
        "layer", "norm of each layer, or of the model; model needs one bucket, without overlap", choices=("layer", "model")
    )
    warmup: int = knob(0, "steps with gentler compression, in five stages; 0 = none", least=0)
    decay: float = knob(1.0, "factor of the residual in each step; below 1, old entries fade", above=0, most=1)

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

    @torch.no_grad()
    def cut(self, grads: Sequence[Tensor], world: World, loss_scale: Tensor | None = None) -> None:
        """Cut a rank's gradients, where the spec says clip=, as torch does. loss_scale: by which they are still multiplied.

        A layer with an entry that is not finite has no norm. Its finite entries go to the residual.
        """
        if not self.clip or not grads:
            return
        squares = torch.stack([each.double().square().sum() for each in grads])
        if loss_scale is not None:
            squares /= loss_scale.to(squares.device, non_blocking=True).double() ** 2
        squares.nan_to_num_(0.0, 0.0, 0.0)
        norms = squares.sum().sqrt().expand_as(squares) if self.clip_by == "model" else squares.sqrt()
        factors = (self.clip / math.sqrt(world.size) / (norms + 1e-6)).clamp(max=1).float()
        torch._foreach_mul_([*grads], [*factors.unbind()])


def with_feedback(compressor: Compressor, **settings: Any) -> Compressor:
    """Wrap a compressor in Feedback, unless it is exact and none of Feedback's knobs is set."""
    if compressor.traits.outermost or (compressor.traits.exact and not settings):
        return compressor
    return Feedback(compressor, **{"feedback": compressor.traits.fed_back, **settings})
