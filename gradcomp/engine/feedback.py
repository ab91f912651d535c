"""Error feedback, and its absence: what turns a bucket's gradients into the one array that a compressor works on."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradcomp import knobs
from gradcomp.engine.wrapper import Wrapper
from gradcomp.knobs import knob
from gradcomp.native import kernels
from gradcomp.native.extension import MOMENTS
from gradcomp.native.memory import Memory
from gradcomp.protocol import Acc, Compressor, Layer, Layout, Steps, Traits
from gradcomp.requests import World

Rates = tuple[float, ...] | None
"""Each layer's learning rate, where an optimizer is known."""

STAGES = 5
"""Steps of a warm-up between sending everything and the compressor itself."""


@dataclass
class BucketState:
    """What a bucket keeps between steps.

    residual: its flat array: the residual, and during a step what the compressor works on. velocity: the local momentum.
    flag: whether a gradient was not finite. inner: the wrapped compressor's own.
    moments, squares, peaks: what accumulating notes.
    """

    residual: Tensor
    flag: Tensor
    inner: Any
    velocity: Tensor | None = None
    moments: Tensor | None = None
    squares: Tensor | None = None
    peaks: Tensor | None = None
    steps: int = 0


class Source(Wrapper):
    """The outermost compressor of a bucket: it also brings the gradients together, each read where it lies."""

    @property
    def traits(self) -> Traits:
        return replace(self.inner.traits, outermost=True)

    def init(self, layout: Layout, seed: int) -> BucketState:
        residual = torch.zeros(layout.total, device=layout.device)
        flag = torch.zeros(1, dtype=torch.int32, device=layout.device)
        return BucketState(residual, flag, self.inner.init(layout, seed))

    @property
    @abstractmethod
    def keeps(self) -> bool:
        """Whether what a step does not send waits for the next one."""

    @abstractmethod
    def collect(self, grads: Sequence[Tensor], state: BucketState, memory: Memory, ranks: int, rates: Rates) -> Acc:
        """Bring a bucket's gradients together with what waits."""


@dataclass(frozen=True)
class Plain(Source):
    """No memory: every step begins with the gradient alone. For what is right in the mean without error feedback."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.inner.traits.unbiased or self.inner.traits.moments:
            raise ValueError(f"{self.inner} needs error feedback")

    @property
    def keeps(self) -> bool:
        return False

    def collect(self, grads: Sequence[Tensor], state: BucketState, memory: Memory, ranks: int, rates: Rates) -> Acc:
        kernels.flatten(grads, state.residual)
        return Acc(state.residual, memory, rates=rates)

    def exchange(self, acc: Acc, state: BucketState, world: World) -> Steps:
        return self.inner.exchange(acc, state.inner, world)


@dataclass(frozen=True)
class Feedback(Source):
    """Error feedback: what a step does not send is added to the next step's gradient.

    With momentum m, the local velocity u and the residual v: u <- m u + g, v <- v + u (nesterov: v + g + m u), and the wrapped
    compressor takes from v. The momentum is then local: the optimizer's own must be 0. With feedback=false, v is forgotten
    after every step, as some papers have it.
    """

    feedback: bool = knob(
        True, "what a step does not send waits for the next one, or is lost; unbiased compressors do without unless asked"
    )
    momentum: float = knob(0.0, "kept locally, before compression: the optimizer's own must be 0", least=0, below=1)
    nesterov: bool = knob(False, "Nesterov's form of the momentum")
    masking: bool = knob(True, "entries that were sent start with fresh momentum")
    clip: float = knob(0.0, "longest gradient, of all ranks together: a rank's is cut to clip / sqrt(ranks); 0 = off", least=0)
    clip_by: str = knob("layer", "layers by themselves, or the model: one bucket, without overlap", choices=("layer", "model"))
    warmup: float = knob(0.0, "steps in which less is compressed, in five stages; 0 = none", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and self.momentum == 0:
            raise ValueError(f"{self}: nesterov needs a momentum above 0")
        if self.warmup and self.inner.ease(0.5) is None:
            raise ValueError(f"{self}: {self.name} has nothing to warm up: it has no gentler form")
        own = self.inner.traits
        if self.momentum and own.momentum:
            raise ValueError(f"{self}: momentum={self.momentum} and the {own.momentum} that {self.inner} keeps would act twice")
        if reason := self.inner.refuses(self.feedback):
            raise ValueError(f"{self}: {reason}")

    def added(self) -> list[str]:
        """An unbiased compressor has no error feedback unless a spec asks for it, or for something that comes with it."""
        own = knobs.given(self)
        return own if own or not self.inner.traits.unbiased else ["feedback=true"]

    @property
    def keeps(self) -> bool:
        return self.feedback

    @property
    def traits(self) -> Traits:
        own = super().traits
        whole_model = own.whole_model or (self.clip > 0 and self.clip_by == "model")
        return replace(own, whole_model=whole_model, momentum=self.momentum or own.momentum)

    def choose(self, name: str, layer: Layer) -> Compressor:
        if self.traits.whole_model:  # a norm over all layers, or an algorithm over all: they stay together
            return self
        chosen = self.inner.choose(name, layer)
        if chosen is self.inner:
            return self
        # Where the algorithm kept the momentum and this layer's compressor does not, it is kept here.
        momentum = self.momentum or (0.0 if chosen.traits.momentum else self.inner.traits.momentum)
        return replace(self, inner=chosen, momentum=momentum, warmup=0.0 if chosen.ease(0.5) is None else self.warmup)

    def init(self, layout: Layout, seed: int) -> BucketState:
        state, layers = super().init(layout, seed), len(layout.names)
        if self.momentum:
            state.velocity = torch.zeros_like(state.residual)
        if self.inner.traits.moments is not None:
            state.moments = torch.zeros(layers, MOMENTS, dtype=torch.float64, device=layout.device)
        if self.inner.traits.sparse:
            state.peaks = kernels.peaks(layout.total, layout.device)
        if self.clip > 0:
            state.squares = torch.zeros(layers, dtype=torch.float64, device=layout.device)
        return state

    def save(self, state: BucketState) -> dict[str, Any]:
        return {"steps": state.steps, "inner": super().save(state)}

    def load(self, state: BucketState, saved: Mapping[str, Any]) -> None:
        state.steps = saved["steps"]
        super().load(state, saved["inner"])

    def collect(self, grads: Sequence[Tensor], state: BucketState, memory: Memory, ranks: int, rates: Rates) -> Acc:
        if not self.feedback:
            state.residual.zero_()
        if rates is not None:
            self.revise(state.residual, state.velocity, state, rates)
        kernels.accumulate(
            grads,
            state.residual,
            state.velocity,
            state.flag,
            self.momentum,
            self.nesterov,
            scales=self._scales(grads, state, memory, ranks),
            moments=state.moments,
            raw=self.inner.traits.moments == "raw",
            peaks=state.peaks,
            memory=memory,
        )
        masked = state.velocity if self.masking else None
        return Acc(state.residual, memory, masked, state.flag, state.moments, rates, state.peaks)

    def exchange(self, acc: Acc, state: BucketState, world: World) -> Steps:
        inner = self.stage(state.steps)
        state.steps += 1
        return inner.exchange(acc, state.inner, world)

    def stage(self, steps: int) -> Compressor:
        """The wrapped compressor after so many steps: itself, or while warming up a gentler form of it."""
        if steps >= self.warmup:
            return self.inner
        gentler = self.inner.ease((int(STAGES * steps / self.warmup) + 1) / (STAGES + 1))
        assert gentler is not None
        return gentler

    def _scales(self, grads: Sequence[Tensor], state: BucketState, memory: Memory, ranks: int) -> Tensor | None:
        """What each layer's gradient is multiplied by to be no longer than allowed."""
        if state.squares is None:
            return None
        kernels.sum_squares(grads, state.squares, memory)
        whole = self.clip_by == "model"
        norms = state.squares.sum().sqrt().expand_as(state.squares) if whole else state.squares.sqrt()
        return (self.clip / math.sqrt(ranks) / (norms + 1e-6)).clamp(max=1).float()


def complete(compressor: Compressor, **asked: Any) -> Compressor:
    """The compressor with the error feedback that it needs, or that is asked for."""
    if compressor.traits.outermost or (compressor.traits.unbiased and not asked):
        return compressor
    return Feedback(compressor, **asked)
