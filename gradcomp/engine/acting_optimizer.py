"""The optimizer that applies a session's updates: found among all that step, with the parameters that came to it too late."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradcomp.core.compressor import Compressor
from gradcomp.engine.optimizer_steps import listeners
from gradcomp.engine.origin import Origin
from gradcomp.engine.slots import Slots, check_optimizer
from gradcomp.engine.taken_momentum import check_momentum, steps_as_known

_UNEXCHANGED = (
    "{name} of shape {shape} was unfrozen or added after the ranks' exchange was set up: its gradient stays on this rank, and "
    "the replicas drift apart. It must be in the model and in the optimizer, and unfrozen, when the exchange is set up. Freeze "
    "it right after that, by requires_grad_(False), until it is to train"
)


@dataclass
class _Known:
    """An optimizer's parameters, as far as the session knows them.

    foreign: ids of those that the session never had. count: all of them. trains: some are the session's own.
    not_exchanged: those that came too late.
    """

    foreign: set[int]
    count: int = -1
    trains: bool = False
    not_exchanged: list[torch.nn.Parameter] = field(default_factory=list)


class ActingOptimizer:
    """The optimizer that acts on the slots' parameters.

    optimizer: the source of learning rates; None if none was given. An optimizer that trains as much as this one replaces it:
    hvd.DistributedOptimizer makes another object. The one that acts is the last that stepped and trains all of the slots'
    parameters, or else the source.

    is_told: all ranks knew the optimizer before their first exchange. exchanged: gradients have been exchanged. replaced:
    another session has exchanged gradients of the same parameters since.
    """

    def __init__(self, slots: Slots, optimizer: torch.optim.Optimizer | None):
        self.slots, self.optimizer = slots, optimizer
        self.is_told = optimizer is not None
        self.exchanged = self.replaced = False
        self._acts: weakref.ref[torch.optim.Optimizer] | None = None
        self._known: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Known] = weakref.WeakKeyDictionary()
        self._ids = {id(parameter) for parameter in slots.parameters.values()}
        self._trained: tuple[Any, list[int], tuple[bool, bool]] = None, [], (False, False)
        self.origin = Origin()
        if optimizer is not None:
            check_optimizer(optimizer)
            if not self._trained_by(optimizer):
                raise ValueError(
                    "optimizer= has none of the model's parameters; pass the optimizer that trains them. If it trains copies, "
                    "as float32 ones of bfloat16 weights, leave optimizer= out, and let the spec be blocks, which rounds "
                    "gradients finely; or keep the weights in float32, and compute under torch.autocast"
                )
            self._known[optimizer] = _Known(self._foreign(optimizer))

    @property
    def acting(self) -> torch.optim.Optimizer | None:
        """The optimizer that applies the updates; None if it is unknown, or applies another session's."""
        if self.replaced:
            return None
        return (None if self._acts is None else self._acts()) or self.optimizer

    @property
    def in_part(self) -> list[torch.optim.Optimizer]:
        """The optimizers that have stepped and train some of the parameters, if none that trains all of them is known."""
        is_known = self.acting is not None and self._trained_by(self.acting) == self._ids
        return [] if is_known else [each for each, known in self._known.items() if known.trains]

    def owns(self, parameter: Tensor) -> bool:
        """Decide whether the session exchanges a parameter's gradient."""
        return id(parameter) in self._ids

    def trains(self, optimizer: torch.optim.Optimizer) -> bool:
        """Decide whether an optimizer trains some of the session's parameters."""
        return not self.replaced and any(map(self.owns, parameters_of(optimizer)))

    def calls_once(self, optimizer: torch.optim.Optimizer) -> bool:
        """Decide whether an optimizer trains them, and its step begins with the only call of a closure."""
        return steps_as_known(type(optimizer)) and self.trains(optimizer)

    def note_exchange(self) -> None:
        """Note that gradients are exchanged. Another session's view of the same parameters ends with the first ones."""
        if self.exchanged:
            return
        self.exchanged = True
        for other in self._others():
            if other.exchanged:
                other.replaced |= bool(other._ids & self._ids)

    def note_optimizer(self, optimizer: torch.optim.Optimizer, compressor: Compressor) -> None:
        """Note the optimizer that will apply the updates, before its first step."""
        self.is_told = True
        self._meet(optimizer, compressor)
        self._note_acting(optimizer)

    def check_step(self, optimizer: torch.optim.Optimizer, compressor: Compressor) -> bool:
        """Check an optimizer that is about to step. Return whether it trains some of the session's parameters."""
        if self.replaced:
            return False
        if not self.exchanged:
            if hasattr(optimizer, "synchronize") and self.trains(optimizer):  # Horovod's
                self.origin.expect_marks(optimizer)
            return False
        self._meet(optimizer, compressor)
        known = self._known[optimizer]
        self._update(known, optimizer)
        if known.trains:
            self._note_acting(optimizer)
        return known.trains

    def refuse_misuse(self, optimizer: torch.optim.Optimizer, keeps_state: bool) -> None:
        """Refuse a gradient of a parameter that came too late, which no rank exchanges, and a change of maximize."""
        if keeps_state:
            self.origin.check_sign(optimizer)
        for parameter in self._known[optimizer].not_exchanged:
            if parameter.requires_grad and parameter.grad is not None:
                frozen = self.slots.without_gradient
                name = next((repr(name) for name, each in frozen if each is parameter), "a parameter")
                raise RuntimeError(_UNEXCHANGED.format(name=name, shape=tuple(parameter.shape)))

    def _meet(self, optimizer: torch.optim.Optimizer, compressor: Compressor) -> None:
        """Note an optimizer. If it replaces the given one, parameters that it has beyond the given one's were added since."""
        if optimizer in self._known:
            return
        if trained := self._trained_by(optimizer):
            check_momentum(compressor, optimizer)
        foreign = self._foreign(optimizer)
        if self.optimizer is not None and trained >= self._trained_by(self.optimizer):
            foreign, self.optimizer = self._known[self.optimizer].foreign, optimizer
        self._known[optimizer] = _Known(foreign)

    def _note_acting(self, optimizer: torch.optim.Optimizer) -> None:
        if (self._acts is None or self._acts() is not optimizer) and self._trained_by(optimizer) == self._ids:
            self._acts = weakref.ref(optimizer)

    def _foreign(self, optimizer: torch.optim.Optimizer) -> set[int]:
        frozen = {id(parameter) for _, parameter in self.slots.without_gradient}
        return {id(each) for each in parameters_of(optimizer)} - self._ids - frozen

    def _update(self, known: _Known, optimizer: torch.optim.Optimizer) -> None:
        """Look through the parameters of an optimizer if their number has changed."""
        if known.count == sum(len(group["params"]) for group in optimizer.param_groups):
            return
        every = [*parameters_of(optimizer)]
        known.count, known.trains = len(every), any(map(self.owns, every))
        others = [other for other in self._others() if not other.replaced]
        known.not_exchanged = [
            each
            for each in every
            if id(each) not in known.foreign and not self.owns(each) and not any(other.owns(each) for other in others)
        ]

    def _others(self) -> list[ActingOptimizer]:
        return [each.view for each in listeners() if each.view is not self]

    def _trained_by(self, optimizer: torch.optim.Optimizer) -> set[int]:
        """Return the ids of the session's parameters that an optimizer has."""
        return {id(each) for each in parameters_of(optimizer)} & self._ids

    def _trains_just_these(self, optimizer: torch.optim.Optimizer) -> bool:
        """Decide whether the optimizer trains all of the slots' parameters and no others. Others may be frozen."""
        return self._compare(optimizer) == (True, False)

    def _compare(self, optimizer: torch.optim.Optimizer) -> tuple[bool, bool]:
        """Return whether an optimizer has all of the slots' parameters, and whether it has others that are not frozen."""
        counts = [len(group["params"]) for group in optimizer.param_groups]
        if self._trained[0] is not optimizer or self._trained[1] != counts:
            every = {id(each): each for each in parameters_of(optimizer)}
            others = any(each.requires_grad for key, each in every.items() if key not in self._ids)
            self._trained = optimizer, counts, (self._ids <= every.keys(), others)
        return self._trained[2]


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterable[torch.nn.Parameter]:
    """Go through an optimizer's parameters."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
