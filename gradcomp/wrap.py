"""Compressors around compressors: what turns a bucket's gradients into the one array that a compressor works on."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from gradcomp import kernels
from gradcomp.core import Acc, Compressor, Layer, Layout, Steps, World


class Source(Protocol):
    """The outermost compressor of a bucket: it also brings the gradients together, each read where it lies."""

    @property
    def inner(self) -> Compressor: ...
    @property
    def whole_model(self) -> bool: ...
    def init(self, layout: Layout, seed: int) -> Memory: ...
    def collect(self, grads: Sequence[Tensor], memory: Memory, ranks: int, rates: Rates) -> Acc: ...
    def exchange(self, acc: Acc, state: Memory, world: World) -> Steps: ...


Rates = tuple[float, ...] | None
"""Each layer's learning rate, where an optimizer is known."""


@dataclass
class Memory:
    """What a bucket keeps between steps: its flat array, the local momentum, and the wrapped compressor's own state."""

    value: Tensor
    velocity: Tensor | None
    flag: Tensor
    inner: Any
    moments: Tensor | None = None
    squares: Tensor | None = None
    peaks: Tensor | None = None
    steps: int = 0


def _memory(inner: Compressor, layout: Layout, seed: int, momentum: bool) -> Memory:
    value = torch.zeros(layout.total, device=layout.device)
    velocity = torch.zeros_like(value) if momentum else None
    flag = torch.zeros(1, dtype=torch.int32, device=layout.device)
    return Memory(value, velocity, flag, inner.init(layout, seed))


@dataclass(frozen=True)
class Flat:
    """No memory: every step begins with the gradient alone. What a compressor without error feedback is driven through."""

    inner: Compressor

    @property
    def whole_model(self) -> bool:
        return self.inner.whole_model

    def init(self, layout: Layout, seed: int) -> Memory:
        return _memory(self.inner, layout, seed, momentum=False)

    def collect(self, grads: Sequence[Tensor], memory: Memory, ranks: int, rates: Rates) -> Acc:
        kernels.flatten(grads, memory.value)
        return Acc(memory.value, rates=rates)

    def exchange(self, acc: Acc, state: Memory, world: World) -> Steps:
        return self.inner.exchange(acc, state.inner, world)


STAGES = 5
"""Steps of a warm-up between sending everything and the compressor itself."""


@dataclass(frozen=True)
class Feedback(Compressor):
    """Error feedback: what a step does not send is added to the next step's gradient.

    With momentum m, the local velocity u and the residual v: u <- m u + g, v <- v + u (nesterov: v + g + m u), and the wrapped
    compressor takes from v. The momentum is then local: the optimizer's own must be 0.
    """

    inner: Compressor
    momentum: float = 0.0  # higher = smoother, but stale entries push longer
    nesterov: bool = False
    masking: bool = True  # entries that were sent start with fresh momentum
    clip: float = 0.0  # longest gradient, of all ranks together: a rank's is cut to clip / sqrt(ranks); 0 = as it is
    clip_by: str = "layer"  # layer, or model: one bucket that waits for the last gradient, without overlap
    warmup: float = 0.0  # how long to compress less, in five stages; lower = fewer bytes, rougher start
    epoch: int = 0  # steps of an epoch, where warmup counts epochs; 0 = it counts steps

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must lie in [0, 1), not {self.momentum}")
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs a momentum above 0")
        if not 0 <= self.clip < math.inf:
            raise ValueError(f"clip must be 0 (off) or more, not {self.clip}")
        if self.clip_by not in ("layer", "model"):
            raise ValueError(f"clip_by must be 'layer' or 'model', not {self.clip_by!r}")
        if not 0 <= self.warmup < math.inf or self.epoch < 0:
            raise ValueError(f"warmup and epoch must be 0 or more, not {self.warmup} and {self.epoch}")
        if self.warmup and self.inner.eased(0.5) is None:
            raise ValueError(f"{type(self.inner).__name__.lower()} has nothing to warm up: it has no gentler form")
        if self.momentum and self.inner.local_momentum:
            raise ValueError("momentum and sam would act twice; set one of them to 0")
        if reason := self.inner.against_feedback():
            raise ValueError(reason)

    @property
    def whole_model(self) -> bool:
        return self.inner.whole_model or (self.clip > 0 and self.clip_by == "model")

    @property
    def unbiased(self) -> bool:
        return self.inner.unbiased

    @property
    def local_momentum(self) -> float:
        return self.momentum or self.inner.local_momentum

    @property
    def needs_rates(self) -> bool:
        return self.inner.needs_rates

    @property
    def reads_rates(self) -> bool:
        return self.inner.reads_rates

    def choose(self, name: str, layer: Layer) -> Compressor:
        if self.whole_model:  # a norm over all layers, or an algorithm over all: they stay together
            return self
        chosen = self.inner.choose(name, layer)
        if chosen is self.inner:
            return self
        # Where the algorithm kept the momentum and this layer's compressor does not, it is kept here.
        momentum = self.momentum or (0.0 if chosen.local_momentum else self.inner.local_momentum)
        return replace(self, inner=chosen, momentum=momentum, warmup=0.0 if chosen.eased(0.5) is None else self.warmup)

    def init(self, layout: Layout, seed: int) -> Memory:
        memory = _memory(self.inner, layout, seed, momentum=self.momentum > 0)
        layers = len(layout.names)
        if self.inner.moments is not None:
            memory.moments = torch.zeros(layers, kernels.MOMENTS, dtype=torch.float64, device=layout.device)
        if self.inner.sparse:
            memory.peaks = kernels.peaks(layout.total, layout.device)
        if self.clip > 0:
            memory.squares = torch.zeros(layers, dtype=torch.float64, device=layout.device)
        return memory

    def collect(self, grads: Sequence[Tensor], memory: Memory, ranks: int, rates: Rates) -> Acc:
        if rates is not None:
            self.inner.revise(memory.value, memory.velocity, memory.inner, rates)
        kernels.accumulate(
            grads,
            memory.value,
            memory.velocity,
            memory.flag,
            self.momentum,
            self.nesterov,
            scales=self._scales(grads, memory, ranks),
            moments=memory.moments,
            raw=self.inner.moments == "raw",
            peaks=memory.peaks,
        )
        masked = memory.velocity if self.masking else None
        return Acc(memory.value, masked, memory.flag, memory.moments, rates, memory.peaks)

    def exchange(self, acc: Acc, state: Memory, world: World) -> Steps:
        inner = self.stage(state.steps)
        state.steps += 1
        return inner.exchange(acc, state.inner, world)

    def stage(self, steps: int) -> Compressor:
        """The wrapped compressor after so many steps: itself, or while warming up a gentler form of it."""
        length = self.warmup * max(self.epoch, 1)
        if steps >= length:
            return self.inner
        eased = self.inner.eased((int(STAGES * steps / length) + 1) / (STAGES + 1))
        assert eased is not None
        return eased

    def _scales(self, grads: Sequence[Tensor], memory: Memory, ranks: int) -> Tensor | None:
        """What each layer's gradient is multiplied by to be no longer than allowed."""
        if memory.squares is None:
            return None
        kernels.sum_squares(grads, memory.squares)
        whole = self.clip_by == "model"
        norms = memory.squares.sum().sqrt().expand_as(memory.squares) if whole else memory.squares.sqrt()
        return (self.clip / math.sqrt(ranks) / (norms + 1e-6)).clamp(max=1).float()


@dataclass(frozen=True)
class ByLayer(Compressor):
    """A compressor of its own for the layers whose names match a pattern; the first rule that matches counts.

    compressors.by_layer({"*.bias": "dense", "embed*": "topk:ratio=0.01"}, "sdagc") makes what the spec
    "sdagc; *.bias=dense; embed*=topk:ratio=0.01" means.
    """

    rules: tuple[tuple[str, Compressor], ...]
    default: Compressor

    def choose(self, name: str, layer: Layer) -> Compressor:
        for pattern, compressor in self.rules:
            if fnmatch.fnmatchcase(name, pattern):
                return compressor.choose(name, layer)
        return self.default.choose(name, layer)

    @property
    def local_momentum(self) -> float:
        return max(compressor.local_momentum for compressor in self._all())

    @property
    def needs_rates(self) -> bool:
        return any(compressor.needs_rates for compressor in self._all())

    @property
    def reads_rates(self) -> bool:
        return any(compressor.reads_rates for compressor in self._all())

    def exchange(self, acc: Acc, state: Any, world: World) -> Steps:
        raise TypeError("ByLayer only chooses; its compressors exchange")

    def _all(self) -> list[Compressor]:
        return [self.default, *(compressor for _, compressor in self.rules)]


def source(compressor: Compressor) -> Source:
    """What drives this compressor: error feedback where it has it, else the gradients as they are."""
    if isinstance(compressor, Feedback):
        return compressor
    if compressor.moments is not None:
        raise ValueError(f"{compressor} reads statistics that are kept by error feedback: put Feedback around it")
    return Flat(compressor)
