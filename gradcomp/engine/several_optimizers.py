"""The exchange's view of several optimizers of one model: each trains layers of its own, which share no bucket with others'."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradcomp.core.compressor import Compressor, Layout
from gradcomp.core.requests import World
from gradcomp.engine.bucket import Bucket
from gradcomp.engine.context import UNKNOWN, LayerRates, StepContext
from gradcomp.engine.delivery import Delivery
from gradcomp.engine.optimizer_steps import warn_user
from gradcomp.engine.optimizer_view import OptimizerView
from gradcomp.engine.slots import Slots, check_optimizer
from gradcomp.engine.taken_momentum import Missed
from gradcomp.engine.user_clip import UserClip
from gradcomp.native.memory import Memory

_WITHOUT = (
    "optimizer= has no optimizer of {layers}: the exchange takes no momentum over for them until their optimizer steps; pass "
    "all optimizers of the model"
)
_TWICE = "optimizer= has two optimizers of {layer!r}; let one of them train it"

_BEHIND = (
    "{name} has not stepped since the last exchange, but another optimizer of the model has: its update holds momentum, and "
    "would be lost, or added to the next gradient. Let all optimizers step after each exchange, or write momentum=0 into the "
    "spec; under auto, loss=low"
)


def view_of(slots: Slots, optimizer: Any = None, scaler: Any = None) -> OptimizerView:
    """Make the view of an optimizer, of a sequence of optimizers, or of one that is unknown yet."""
    if not isinstance(optimizer, Sequence):
        return OptimizerView(slots, optimizer, scaler)
    if not optimizer:
        raise ValueError("optimizer= is an empty list; pass the optimizers of the model, or leave it out")
    return OptimizerView(slots, optimizer[0], scaler) if len(optimizer) == 1 else SeveralOptimizers(slots, optimizer, scaler)


class SeveralOptimizers(OptimizerView):
    """A view of several optimizers. It has one for each, of the optimizer's own layers.

    parts: these views. One more has the layers that no optimizer was given for, if there are any.
    """

    parts: Sequence[OptimizerView] = ()

    def __init__(self, slots: Slots, optimizers: Sequence[torch.optim.Optimizer], scaler: Any = None):
        super().__init__(slots, None, scaler)
        self.is_told = True
        left, parts = {id(slot.parameter): slot for slot in slots.slots}, []
        trained: set[int] = set()
        for optimizer in optimizers:
            check_optimizer(optimizer)
            ids = self._trained_by(optimizer)
            if twice := ids & trained:
                raise ValueError(_TWICE.format(layer=next(s.name for s in slots.slots if id(s.parameter) in twice)))
            trained |= ids
            own = [left.pop(id(slot.parameter)) for slot in slots.slots if id(slot.parameter) in ids]
            parts.append(OptimizerView(Slots(own, slots.without_gradient), optimizer))
        if left:
            names = [repr(slot.name) for slot in left.values()]
            more = f" and {len(names) - 3} more layers" if len(names) > 3 else ""
            warn_user(_WITHOUT.format(layers=", ".join(names[:3]) + more))
            parts.append(OptimizerView(Slots([*left.values()], slots.without_gradient)))
        self.parts = parts
        for part in parts:
            part._sample.siblings = [each._sample for each in parts]
        self._part_of = {slot.name: part for part, view in enumerate(parts) for slot in view.slots.slots}
        self._joined: tuple[list[LayerRates | None], LayerRates] = [], LayerRates({})

    # The facts of the optimizers.

    @property
    def replaced(self) -> bool:
        """True if another session has exchanged gradients of the same parameters since."""
        return self._replaced

    @replaced.setter
    def replaced(self, value: bool) -> None:
        self._replaced = value
        for part in self.parts:
            part.replaced = value

    @property
    def is_linear(self) -> bool:
        return all(part.is_linear for part in self.parts)

    @property
    def taken(self) -> bool:
        return any(part.taken for part in self.parts)

    @property
    def tolerates_delay(self) -> bool:
        return all(part.tolerates_delay for part in self.parts)

    @property
    def has_no_momentum(self) -> bool:
        return all(part.has_no_momentum for part in self.parts)

    @property
    def missed(self) -> Missed | None:
        return next((missed for part in self.parts if (missed := part.missed) is not None), None)

    def exchanges(self, takes_momentum: bool) -> str:
        if not takes_momentum:
            return super().exchanges(takes_momentum)
        texts = (f"{part.exchanges(takes_momentum)}, in {len(part.slots.slots)} layers" for part in self.parts)
        return "; ".join(texts)

    @property
    def terms(self) -> dict[str, str]:
        texts = [f"{part.terms['optimizer']}, in {len(part.slots.slots)} layers" for part in self.parts]
        return {"optimizer": "; ".join(texts + [", ".join(part.slots.layers) for part in self.parts])}

    @property
    def generation(self) -> tuple[int, int]:
        """The sums of the optimizers' generations: the moments of all begin anew with those of one."""
        loaded, changed = zip(*(part.generation for part in self.parts), strict=True)
        return sum(loaded), sum(changed)

    def part_of(self, name: str) -> int:
        return self._part_of[name]

    def rates(self) -> LayerRates | None:
        found = [part.rates() for part in self.parts]
        if len(found) != len(self._joined[0]) or any(a is not b for a, b in zip(found, self._joined[0], strict=True)):
            own = {name: UNKNOWN if (of := found[part]) is None else of[name] for name, part in self._part_of.items()}
            self._joined = found, LayerRates({slot.name: own[slot.name] for slot in self.slots.slots})
        return self._joined[1]

    def check_momentum(self, compressor: Compressor) -> None:
        for part in self.parts:
            part.check_momentum(compressor)

    # A step of the exchange.

    def context(
        self, layouts: Sequence[Layout], memory: Memory, world: World, uses_rates: bool, takes_momentum: bool
    ) -> StepContext:
        joint = super().context(layouts, memory, world, uses_rates, takes_momentum=False)
        if not takes_momentum:  # a bucket may have layers of several optimizers
            return joint
        behind = [part.acting for part in self.parts if part.update_waits]
        if behind and any(part.taken and part.acting not in behind for part in self.parts):
            raise RuntimeError(_BEHIND.format(name=type(behind[0]).__name__))
        for number, part in enumerate(self.parts):
            own = [layout for layout in layouts if self._part_of[layout.names[0]] == number]
            of_part = part.context(own, memory, world, uses_rates, takes_momentum)
            joint.momenta = {**joint.momenta, **of_part.momenta}
            joint.follows_rates = joint.follows_rates | of_part.follows_rates
        joint.generation = self.generation
        return joint

    def note_delivered(self, buckets: Sequence[Bucket], delivery: Delivery, step: int) -> None:
        for number in {self._part_of[name] for bucket in buckets for name in bucket.layout.names}:
            part = self.parts[number]
            part.note_delivered(buckets, delivery, step)
            if not any(each.requires_grad for each in part.slots.parameters.values()):
                part.forget_update()  # frozen layers have none, and their optimizer need not step

    # Between two steps.

    @property
    def update_waits(self) -> bool:
        return any(part.update_waits for part in self.parts)

    def forget_update(self) -> None:
        for part in self.parts:
            part.forget_update()

    def take_back_update(self, stays: bool) -> None:
        for part in self.parts:
            part.take_back_update(stays)

    def note_loaded(self, moments: bool) -> None:
        for part in self.parts:
            part.note_loaded(moments)

    def leave(self) -> None:
        for part in self.parts:
            part.leave()

    def arrays_to_hand_back(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for part in self.parts for name in part.arrays_to_hand_back()))

    def hand_back(self, means: Mapping[str, Mapping[str, Tensor]], steps: Mapping[str, int], ranks: int) -> dict[str, float]:
        factors: dict[str, float] = {}
        for part in self.parts:
            if part.arrays_to_hand_back():
                factors |= part.hand_back(means, steps, ranks)
        return factors

    # The user's clip of updates.

    @property
    def clips(self) -> bool:
        return any(part.clips for part in self.parts)

    @property
    def looks_for_clip(self) -> bool:
        return any(part.looks_for_clip for part in self.parts)

    def bounds(self) -> Sequence[tuple[UserClip, Collection[str]]]:
        return [each for part in self.parts for each in part.bounds()]

    # A step of one of the optimizers.

    def note_exchange(self) -> None:
        super().note_exchange()
        for part in self.parts:
            part.exchanged = True

    def check_step(self, optimizer: torch.optim.Optimizer, compressor: Compressor) -> bool:
        return any([part.check_step(optimizer, compressor) for part in self.parts])  # noqa: C419 - all of them check

    def steps_at_once(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(part.steps_at_once(optimizer) for part in self.parts)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        for part in self.parts:
            part.before_step(optimizer)

    def show(self) -> None:
        for part in self.parts:
            part.show()

    def refuse_misuse(self, optimizer: torch.optim.Optimizer, keeps_state: bool) -> None:
        for part in self.parts:
            part.refuse_misuse(optimizer, keeps_state)
