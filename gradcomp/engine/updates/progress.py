"""Progress: what one bucket keeps for an exchange of updates, from the weights before a step to the weights after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradcomp.core.compressor import Acc, Layout
from gradcomp.engine.context import StepContext
from gradcomp.engine.slots import Slot
from gradcomp.engine.updates.adam_noise import DELAY, RankNoise
from gradcomp.engine.updates.hidden_momentum import Momentum
from gradcomp.native import kernels
from gradcomp.native.extension import LARGEST
from gradcomp.native.memory import Update


@dataclass
class StepRule:
    """How the steps of a bucket's optimizer go into the residual.

    momentum: the one that the residual stands for. normalizes: the optimizer is Adam's kin (adam_noise). decays: of each layer,
    the share of a weight that the step takes away beside the gradient's; none where it does not matter.
    """

    momentum: Momentum = field(default_factory=Momentum)
    normalizes: bool = False
    decays: Sequence[float] = ()


class Weights:
    """The weights of a bucket's layers as flat arrays, each in its own memory. A parameter may be given other memory at any
    time. One whose memory has gaps is copied before a kernel reads it, and back after one has written it."""

    def __init__(self, slots: Sequence[Slot]):
        self._slots = slots
        self._parameters = [slot.parameter for slot in slots if slot.parameter is not None]
        self._at: list[int] = []
        self.copied: list[int] = []
        self.arrays: list[Tensor] = []

    def read(self) -> list[Tensor]:
        """Return the arrays, with the weights of now."""
        at = [*map(torch.Tensor.data_ptr, self._parameters)]
        if at != self._at:
            self._at = at
            self.arrays = [slot.flat(each.data) for slot, each in zip(self._slots, self._parameters, strict=True)]
            self.copied = [i for i, each in enumerate(self.arrays) if each.data_ptr() != at[i]]
        for i in self.copied:
            self.arrays[i].copy_(self._slots[i].flat(self._parameters[i].data))
        return self.arrays

    def written(self) -> None:
        """Give copies back to their parameters."""
        for i in self.copied:
            self._parameters[i].data.copy_(self._slots[i].shaped(self.arrays[i]))


class Progress:
    """What one bucket keeps for an exchange of a share of its residual by age.

    residual: of the bucket. start: the weights before the step, and after it what is offered of the residual. ages: the steps
    since each entry was last sent, at most 255; None until entries wait behind a momentum. selects: the compressor sends some
    entries and leaves others. keeps_rest: what it leaves of the offer stays. rule: of the present step. skipped: a GradScaler's
    found_inf, where the optimizer itself skips a step; nothing is offered then. weights: of the layers; None where gradients
    take their place, whose momentum is the spec's.
    """

    def __init__(self, layout: Layout, residual: Tensor, seed: int, slots: Sequence[Slot] | None = None):
        self.layout, self.residual = layout, residual
        self.weights = None if slots is None else Weights(slots)
        self.start = torch.empty(layout.total, device=layout.device)
        self.ages: Tensor | None = None
        self.selects = self.keeps_rest = True
        self.rule = StepRule()
        self.noise = RankNoise(layout, seed)
        self.flag = torch.zeros(1, dtype=torch.int32, device=layout.device)
        self.skipped: Tensor | None = None
        self.moments: Tensor | None = None
        self.peaks: Tensor | None = None
        self._shares = Momentum(), torch.tensor(Momentum().shares(), device=layout.device)
        self._decays: tuple[Sequence[float], Tensor | None] = (), None

    def begin(self) -> None:
        """Copy the weights before a step."""
        assert self.weights is not None
        kernels.flatten(self.weights.read(), self.start)

    def offer(self, context: StepContext, step: int, residual_factor: float, frozen: Sequence[int]) -> Acc:
        """Add start minus now to the residual, and offer a share of it. The weights return to their start.

        step: the number of the bucket's steps before.
        """
        assert self.weights is not None
        factor = 1.0
        if self.rule.normalizes:
            if step % DELAY == 0:  # all that comparisons do comes then
                self.noise.begin(step, context.world.size, self.residual)
            factor = self.noise.factor
        decays = None if factor == 1 else self._decays_of(self.rule.decays)
        acc = self._offer(self.weights.read(), context, factor, residual_factor, frozen, decays)
        if self.weights.copied:
            self.weights.written()
        if self.rule.normalizes and self.noise.samples is not None:
            self.noise.note(self.residual, self.start, self.flag)
        return acc

    def offer_of_gradients(
        self, grads: Sequence[Tensor], context: StepContext, residual_factor: float, frozen: Sequence[int]
    ) -> Acc:
        """Add the whole effect of gradients to the residual, with a momentum, and offer a share of it. They become zeros."""
        self.start.zero_()
        return self._offer(grads, context, -1 / (1 - self.rule.momentum.value), residual_factor, frozen, None)

    def _offer(
        self,
        arrays: Sequence[Tensor],
        context: StepContext,
        factor: float,
        residual_factor: float,
        frozen: Sequence[int],
        decays: Tensor | None,
    ) -> Acc:
        momentum = self.rule.momentum
        if self._shares[0] != momentum:
            self._make_shares(momentum)
        if self.ages is None and self.selects and momentum.value:
            self.ages = self.make_ages()
        shares = self._shares[1]
        if self.skipped is not None:  # 1 where the optimizer has skipped its step: a GPU is not asked
            shares = shares * (1 - self.skipped.reshape(-1)[:1].to(shares.device, non_blocking=True))
        kernels.offer_progress(
            arrays,
            self.start,
            self.residual,
            self.ages,
            shares,
            self.flag,
            decays=decays,
            factor=factor,
            residual_factor=residual_factor,
            moments=self.moments,
            peaks=self.peaks,
            memory=context.memory,
        )
        spans = self.layout.spans_of(frozen) if frozen else ()
        rates = None if context.layer_rates is None else context.rates(self.layout)
        return Acc(self.start, context.memory, self.ages, self.flag, self.moments, rates, self.peaks, spans)

    def deliver(self, update: Update, scale: float) -> None:
        """Move the weights by scale times the mean update, and return the rest of the offer to the residual."""
        assert self.weights is not None
        flat = update.flat
        if not self.keeps_rest:
            if flat.data_ptr() == self.start.data_ptr():
                flat = flat.clone()
            self.start.zero_()
        kernels.deliver_progress(flat, self.weights.arrays, self.start, self.residual, scale, update.marks)
        if self.weights.copied:
            self.weights.written()

    @torch.no_grad()
    def go_back(self) -> None:
        """Return the weights to their start, of a step that is not exchanged."""
        assert self.weights is not None
        for array, start in zip(self.weights.read(), self.start.split(self.layout.sizes), strict=True):
            array.copy_(start)
        if self.weights.copied:
            self.weights.written()

    def return_rest(self) -> None:
        """Return the rest of the offer to the residual, after an exchange of gradients."""
        if self.keeps_rest:
            self.residual.add_(self.start).clamp_(-LARGEST, LARGEST)

    def make_ages(self) -> Tensor:
        """Make ages: what waits already has waited for long."""
        return self.residual.ne(0).to(torch.uint8) * 255

    def _make_shares(self, momentum: Momentum) -> None:
        shares = torch.tensor(momentum.shares())
        self._shares = momentum, shares.to(self.layout.device, non_blocking=self.layout.device.type != "cpu")

    def _decays_of(self, decays: Sequence[float]) -> Tensor | None:
        if not any(decays):
            return None
        if self._decays[0] != decays or self._decays[1] is None:
            made = torch.tensor(decays, dtype=torch.float32)
            self._decays = decays, made.to(self.layout.device, non_blocking=self.layout.device.type != "cpu")
        return self._decays[1]
