"""Compressors around compressors: what turns a bucket's gradients into the one array that a compressor works on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from gradcomp import kernels
from gradcomp.core import Acc, Compressor, Layout, Steps, World


class Source(Protocol):
    """The outermost compressor of a bucket: it also brings the gradients together, each read where it lies."""

    @property
    def whole_model(self) -> bool: ...
    def init(self, layout: Layout, seed: int) -> Memory: ...
    def collect(self, grads: Sequence[Tensor], memory: Memory) -> Acc: ...
    def exchange(self, acc: Acc, state: Memory, world: World) -> Steps: ...


@dataclass
class Memory:
    """What a bucket keeps between steps: its flat array, the local momentum, and the wrapped compressor's own state."""

    value: Tensor
    velocity: Tensor | None
    flag: Tensor
    inner: Any


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

    def collect(self, grads: Sequence[Tensor], memory: Memory) -> Acc:
        kernels.flatten(grads, memory.value)
        return Acc(memory.value)

    def exchange(self, acc: Acc, state: Memory, world: World) -> Steps:
        return self.inner.exchange(acc, state.inner, world)


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

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must lie in [0, 1), not {self.momentum}")
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs a momentum above 0")

    @property
    def whole_model(self) -> bool:
        return self.inner.whole_model

    @property
    def unbiased(self) -> bool:
        return self.inner.unbiased

    def init(self, layout: Layout, seed: int) -> Memory:
        return _memory(self.inner, layout, seed, momentum=self.momentum > 0)

    def collect(self, grads: Sequence[Tensor], memory: Memory) -> Acc:
        kernels.accumulate(grads, memory.value, memory.velocity, memory.flag, self.momentum, self.nesterov)
        return Acc(memory.value, memory.velocity if self.masking else None, memory.flag)

    def exchange(self, acc: Acc, state: Memory, world: World) -> Steps:
        return self.inner.exchange(acc, state.inner, world)


def source(compressor: Compressor) -> Source:
    """What drives this compressor: error feedback where it has it, else the gradients as they are."""
    return compressor if isinstance(compressor, Feedback) else Flat(compressor)
