"""Progress: the residual of one bucket, what a step adds to it, and what of it is offered to the compressor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradcomp import saved
from gradcomp.core.compressor import Acc, Layout, Traits
from gradcomp.engine.context import StepContext
from gradcomp.engine.feedback import Feedback
from gradcomp.engine.slots import Slot, local
from gradcomp.engine.updates.adam_noise import DELAY, RankNoise
from gradcomp.engine.updates.hidden_momentum import Momentum
from gradcomp.native import kernels
from gradcomp.native.extension import LARGEST, MOMENTS
from gradcomp.native.memory import Update

# Copies a layer's array for a saved state.
Copy = Callable[[Tensor], Tensor]


@dataclass
class StepRule:
    """How the steps of a bucket's optimizer go into the residual.

    momentum: the one that the residual stands for. normalizes: the optimizer is Adam's kin (adam_noise). decays: of each layer,
    the share of a weight that the step takes away beside the gradient's; none where it does not matter.
    """

    momentum: Momentum = field(default_factory=Momentum)
    normalizes: bool = False
    decays: Sequence[float] = ()


class Statistics:
    """What kernels find out about the entries that a compressor takes from.

    flag: int32[1], not 0 where an entry was not finite. moments: see Acc; None where the compressor reads none.
    """

    def __init__(self, layout: Layout, traits: Traits):
        self.flag = torch.zeros(1, dtype=torch.int32, device=layout.device)
        self.moments: Tensor | None = None
        if traits.moments:
            self.moments = torch.zeros(len(layout.names), MOMENTS, dtype=torch.float64, device=layout.device)


class Share(NamedTuple):
    """What one rank's saved state holds of residuals and ages, as a bucket loads it.

    layers: by field, then by layer, of the whole model. trusted: it comes from this process, and need not be finite. partial:
    layers may be missing, since another spec kept it. prefix: of messages.
    """

    layers: Mapping[str, Any]
    trusted: bool = False
    partial: bool = False
    prefix: str = ""

    def residuals(self, layout: Layout) -> dict[str, Tensor]:
        """Return the residuals of a bucket's layers. Refuse those that do not fit, are not finite, or are missing."""
        theirs, arrays = saved.table_or_empty(self.layers, "residual"), {}
        for name, size in zip(layout.names, layout.sizes, strict=True):
            what = f"{self.prefix}the residual of {name!r}"
            if name in theirs:
                arrays[name] = saved.tensor(theirs, name, (size,), dtype=torch.float32, finite=not self.trusted, what=what)
            elif not self.partial:
                raise ValueError(f"{what} is not in the state: the state is damaged; load another one")
        return arrays

    def ages(self, layout: Layout) -> Tensor | None:
        """Return the ages of a bucket's entries. A residual without any has waited for long: the next send is a whole one."""
        theirs, found = saved.table_or_empty(self.layers, "ages"), {}
        for name, size in zip(layout.names, layout.sizes, strict=True):
            if name in theirs:
                what = f"{self.prefix}the ages of {name!r}"
                found[name] = saved.tensor(theirs, name, (size,), dtype=torch.uint8, what=what)
        if not found:
            return None
        ages = torch.full((layout.total,), 255, dtype=torch.uint8, device=layout.device)
        waiting = saved.table_or_empty(self.layers, "residual")
        for name, view in layout.views(ages).items():
            if name in found:
                view.copy_(found[name])
            elif name not in waiting or not waiting[name].any():
                view.zero_()
        return ages


class Weights:
    """The weights of a bucket's layers as flat arrays, each in its own memory. A parameter may be given other memory at any
    time. One whose memory has gaps is copied before a kernel reads it, and back after one has written it."""

    def __init__(self, slots: Sequence[Slot]):
        self._slots = slots
        self._local: Sequence[Tensor] = [slot.parameter for slot in slots if slot.parameter is not None]
        self._are_sharded = any(hasattr(each, "to_local") for each in self._local)
        self._at: list[int] = []
        self.copied: list[int] = []
        self.arrays: list[Tensor] = []

    def read(self) -> list[Tensor]:
        """Return the arrays, with the weights of now."""
        if self._are_sharded:
            self._local = [local(slot.parameter) for slot in self._slots]
        at = [*map(torch.Tensor.data_ptr, self._local)]
        if at != self._at:
            self._at = at
            self.arrays = [slot.flat(each.data) for slot, each in zip(self._slots, self._local, strict=True)]
            self.copied = [i for i, each in enumerate(self.arrays) if each.data_ptr() != at[i]]
        for i in self.copied:
            self.arrays[i].copy_(self._slots[i].flat(self._local[i].data))
        return self.arrays

    def has_gradient(self, layer: int) -> bool:
        """Say whether a layer has a gradient, without which no optimizer moves it."""
        parameter = self._slots[layer].parameter
        return parameter is not None and parameter.grad is not None

    def written(self) -> None:
        """Give copies back to their parameters."""
        for i in self.copied:
            self._local[i].data.copy_(self._slots[i].shaped(self.arrays[i]))


class Progress:
    """The residual of one bucket, and the share of it, by age, that a step offers.

    residual: flat; what was not sent. start: the weights before the step, and after it what is offered of the residual. ages:
    the steps since each entry was last sent, at most 255; None until entries wait behind a momentum. selects: the compressor
    sends some entries and leaves others. keeps_rest: what it leaves of the offer stays. decay: of the residual in a step.
    rule: of the present step. skipped: a GradScaler's found_inf, where the optimizer itself skips a step; nothing is offered
    then. weights: of the layers; None where a step is given its progress as arrays.
    """

    def __init__(self, layout: Layout, feedback: Feedback, seed: int, slots: Sequence[Slot] | None = None):
        self.layout, self.decay = layout, feedback.decay
        self.weights = None if slots is None else Weights(slots)
        self.residual, self.start = (torch.zeros(layout.total, device=layout.device) for _ in range(2))
        self.ages: Tensor | None = None
        self.selects, self.keeps_rest = feedback.traits.selects, feedback.feedback
        self.rule = StepRule()
        if slots is None and feedback.given_momentum is not None:
            self.rule = StepRule(feedback.given_momentum)
        self.noise = RankNoise(layout, seed)
        self.statistics = Statistics(layout, feedback.inner.traits)
        self.skipped: Tensor | None = None
        self._shares = Momentum(), torch.tensor(Momentum().shares(), device=layout.device)
        self._decays: tuple[Sequence[float], Tensor | None] = (), None

    # A step.

    def begin(self) -> None:
        """Copy the weights before a step."""
        assert self.weights is not None
        kernels.flatten(self.weights.read(), self.start)

    def still(self, layers: Sequence[int]) -> Sequence[int]:
        """Return those of some layers that the step has left alone: it moves a layer that was frozen after backward(), too."""
        assert self.weights is not None
        if not (doubtful := [each for each in layers if self.weights.has_gradient(each)]):
            return layers
        arrays, starts = self.weights.read(), self.start.split(self.layout.sizes)
        have_moved = torch.stack([(arrays[each].float() != starts[each]).any() for each in doubtful]).tolist()
        moved = {each for each, has_moved in zip(doubtful, have_moved, strict=True) if has_moved}
        return [each for each in layers if each not in moved]

    def offer(self, context: StepContext, step: int, frozen: Sequence[int]) -> Acc:
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
        acc = self._offer(self.weights.read(), context, factor, frozen, decays)
        if self.weights.copied:
            self.weights.written()
        if self.rule.normalizes and self.noise.samples is not None:
            self.noise.note(self.residual, self.start, self.statistics.flag)
        return acc

    def offer_given(self, arrays: Sequence[Tensor], context: StepContext, frozen: Sequence[int]) -> Acc:
        """Add the whole effect of given arrays to the residual, and offer a share of it. The arrays become zeros."""
        self.start.zero_()
        return self._offer(arrays, context, -1 / (1 - self.rule.momentum.value), frozen, None)

    def _offer(
        self, arrays: Sequence[Tensor], context: StepContext, factor: float, frozen: Sequence[int], decays: Tensor | None
    ) -> Acc:
        momentum, found = self.rule.momentum, self.statistics
        if self._shares[0] != momentum:
            self._make_shares(momentum)
        if self.ages is None and self.selects and momentum.value:
            self.ages = self.known_ages()
        shares = self._shares[1]
        if self.skipped is not None:  # 1 where the optimizer has skipped its step: a GPU is not asked
            shares = shares * (1 - self.skipped.reshape(-1)[:1].to(shares.device, non_blocking=True))
        kernels.offer_progress(
            arrays,
            self.start,
            self.residual,
            self.ages,
            shares,
            found.flag,
            decays=decays,
            factor=factor,
            residual_factor=self.decay,
            moments=found.moments,
            memory=context.memory,
        )
        spans = self.layout.spans_of(frozen) if frozen else ()
        rates = context.rates(self.layout) if context.uses_rates else None
        return Acc(self.start, context.memory, self.ages, found.flag, found.moments, rates, spans)

    def deliver(self, update: Update, scale: float) -> None:
        """Move the weights by scale times the mean update, and return the rest of the offer to the residual."""
        assert self.weights is not None
        flat = update.flat
        if not self.keeps_rest:
            if flat.data_ptr() == self.start.data_ptr():
                flat = flat.clone()
            self.start.zero_()
        arrays = self.weights.arrays, self.start, self.residual
        update.is_wiped = kernels.deliver_progress(flat, *arrays, scale, update.marks, update.copied)
        if self.weights.copied:
            self.weights.written()

    def return_rest(self) -> None:
        """Return the rest of an offer of given arrays to the residual."""
        if self.keeps_rest:
            self.residual.add_(self.start).clamp_(-LARGEST, LARGEST)

    def take_back(self, delivered: Sequence[Tensor], scale: float) -> None:
        """Add an update that was delivered, scale times, to the residual, but for entries that are not finite."""
        update = torch.cat([each.reshape(-1) for each in delivered]).float() / scale
        self.residual.add_(update.nan_to_num(0.0, 0.0, 0.0)).clamp_(-LARGEST, LARGEST)

    @torch.no_grad()
    def go_back(self) -> None:
        """Return the weights to their start, of a step that is not exchanged."""
        assert self.weights is not None
        for array, start in zip(self.weights.read(), self.start.split(self.layout.sizes), strict=True):
            array.copy_(start)
        if self.weights.copied:
            self.weights.written()

    def known_ages(self) -> Tensor:
        """Return the ages of the entries. What waits without any has waited for long."""
        return self.residual.ne(0).to(torch.uint8) * 255 if self.ages is None else self.ages

    def make_ages(self) -> None:
        """Begin to count ages, of all that waits as of a moment that is about to join it: at once, it would be a long step."""
        if self.ages is None and self.selects:
            self.ages = torch.zeros(self.layout.total, dtype=torch.uint8, device=self.layout.device)

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

    # What stays between steps.

    def empty(self) -> None:
        """Empty the residual."""
        self.residual.zero_()
        if self.ages is not None:
            self.ages.zero_()

    def scale(self, factor: float) -> None:
        """Multiply the residual, for another number of ranks."""
        self.residual.mul_(factor).clamp_(-LARGEST, LARGEST)

    def save(self, copy: Copy) -> dict[str, dict[str, Tensor]]:
        """Return what the next step depends on, by field and layer."""
        arrays = {"residual": self.residual} | ({} if self.ages is None else {"ages": self.ages})
        return {of: {name: copy(view) for name, view in self.layout.views(array).items()} for of, array in arrays.items()}

    def load(self, shares: Sequence[Share], factor: float) -> Callable[[], None]:
        """Check what saved states hold. Return a function that loads it, and cannot fail.

        The residual becomes the sum of the shares', times the factor. Ages are the first share's.
        """
        parts = [share.residuals(self.layout) for share in shares]
        ages = shares[0].ages(self.layout) if shares else None

        def load() -> None:
            self.ages = ages
            self.statistics.flag.zero_()
            for name, view in self.layout.views(self.residual).items():
                view.zero_()
                for part in parts:
                    if name in part:
                        view.add_(part[name].to(view.device), alpha=factor).clamp_(-LARGEST, LARGEST)

        return load
