"""The optimizers that train a session's parameters: checks before their steps, and learning rates."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from gradcomp.core.compressor import Compressor
from gradcomp.engine.context import UNKNOWN
from gradcomp.engine.optimizers import optimizer_hooks
from gradcomp.engine.parameters import NamedParameters, Parameters, check_optimizer

# Where the steps are written that the exchange knows. A subclass with a step() of its own does something else.
KNOWN_STEPS = {f"torch.optim.{name}" for name in ("sgd", "adam", "adamw")}


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


class OptimizerCheck:
    """Checks the optimizers of a session's parameters, and reads learning rates from the one that the user gave.

    given: the source of learning rates, or None. check: called once with each optimizer, before its first step after an
    exchange. before_step: each is called before every such step.
    An optimizer that trains as much as the given one replaces it: hvd.DistributedOptimizer makes another object.
    The one that acts is the last that stepped and trains all of the session's parameters, or else the given one.
    exchanged: gradients have been exchanged. replaced: another session has exchanged gradients of the same parameters
    since, or this one has ended.
    """

    turn: ClassVar[int] = 1

    def __init__(
        self,
        parameters: Parameters,
        given: torch.optim.Optimizer | None,
        check: Callable[[torch.optim.Optimizer], None],
        before_step: Sequence[Callable[[], None]] = (),
    ):
        self.optimizer = given
        self.exchanged = self.replaced = False
        self._acts: weakref.ref[torch.optim.Optimizer] | None = None
        self._rates: tuple[weakref.ref[torch.optim.Optimizer], Callable[[Sequence[str]], tuple[float, ...]]] | None = None
        self._parameters, self._check, self._before_step = parameters, check, before_step
        self._known: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Known] = weakref.WeakKeyDictionary()
        self.is_told = given is not None  # on all ranks alike, other than one that is found at its first step
        if given is not None:
            check_optimizer(given)
            if not self._trained_by(given):
                raise ValueError("optimizer= has none of the model's parameters; pass the optimizer that trains them")
            self._read_rates(given)
        optimizer_hooks.add(self)

    def note_exchange(self) -> None:
        """Note that gradients are exchanged. Another session's checks of the same parameters end with the first ones."""
        if self.exchanged:
            return
        self.exchanged = True
        for other in optimizer_hooks.all_of(OptimizerCheck):
            if other is not self and other.exchanged:
                other.replaced |= any(other.owns(slot.parameter) for slot in self._parameters.slots)

    def before_step(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        """Check an optimizer that is about to step."""
        if not self.exchanged or self.replaced:
            return
        self._meet(optimizer)
        known = self._known[optimizer]
        self._update(known, optimizer)
        if known.trains:
            self._note_acting(optimizer)
            for each in self._before_step:
                each()
            self._refuse_unexchanged(known)

    def after_step(self) -> None:
        """Do nothing: what could be wrong was refused before the step."""

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the optimizer that will apply the session's updates, before its first step."""
        self.is_told = True
        self._meet(optimizer)
        self._note_acting(optimizer)

    def _meet(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer in self._known:
            return
        if trained := self._trained_by(optimizer):
            self._check(optimizer)
        if self.optimizer is not None and trained >= self._trained_by(self.optimizer):
            self._read_rates(optimizer)
        else:
            self._known[optimizer] = _Known(self._foreign(optimizer))

    def acting(self) -> torch.optim.Optimizer | None:
        """Return the optimizer that applies the session's updates; None if it is unknown, or applies another session's."""
        if self.replaced:
            return None
        return (None if self._acts is None else self._acts()) or self.optimizer

    def _note_acting(self, optimizer: torch.optim.Optimizer) -> None:
        if (self._acts is None or self._acts() is not optimizer) and len(self._trained_by(optimizer)) == len(
            self._parameters.slots
        ):
            self._acts = weakref.ref(optimizer)

    def owns(self, parameter: torch.Tensor) -> bool:
        """Decide whether the session exchanges a parameter's gradient."""
        return self._parameters.slot(parameter) is not None

    @property
    def is_linear(self) -> bool:
        """True if the acting optimizer moves weights by multiples of its updates."""
        return is_linear(self.acting())

    def rates(self, names: Sequence[str]) -> tuple[float, ...] | None:
        """Return the current learning rates of parameters; None where no optimizer is known."""
        if (acting := self.acting()) is None:
            return None
        if self._rates is None or self._rates[0]() is not acting:
            self._rates = (
                weakref.ref(acting),
                rates_of(acting, [(slot.name, slot.parameter) for slot in self._parameters.slots]),
            )
        return self._rates[1](names)

    def _read_rates(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the learning rates from an optimizer. What it has more than the given one was added since."""
        assert self.optimizer is not None
        first = self._known.get(self.optimizer)
        self._known[optimizer] = _Known(self._foreign(optimizer) if first is None else first.foreign)
        self.optimizer = optimizer

    def _foreign(self, optimizer: torch.optim.Optimizer) -> set[int]:
        frozen = {id(parameter) for _, parameter in self._parameters.without_gradient}
        return {id(each) for each in _parameters_of(optimizer) if not self.owns(each)} - frozen

    def _update(self, known: _Known, optimizer: torch.optim.Optimizer) -> None:
        """Look through the parameters of an optimizer whose number of them has changed."""
        if known.count == sum(len(group["params"]) for group in optimizer.param_groups):
            return
        every = _parameters_of(optimizer)
        known.count, known.trains = len(every), any(map(self.owns, every))
        others = [other for other in optimizer_hooks.all_of(OptimizerCheck) if other is not self and not other.replaced]
        known.not_exchanged = [
            each
            for each in every
            if id(each) not in known.foreign and not self.owns(each) and not any(other.owns(each) for other in others)
        ]

    def _refuse_unexchanged(self, known: _Known) -> None:
        """Refuse a gradient of a parameter that was unfrozen or added too late: nobody exchanges it."""
        for parameter in known.not_exchanged:
            if parameter.requires_grad and parameter.grad is not None:
                name = next(
                    (repr(name) for name, frozen in self._parameters.without_gradient if frozen is parameter), "a parameter"
                )
                raise RuntimeError(
                    f"{name} of shape {tuple(parameter.shape)} was unfrozen or added after the ranks' exchange was set up: its "
                    "gradient stays on this rank, and the replicas drift apart. It must be in the model and in the optimizer, "
                    "and unfrozen, when hvd.DistributedOptimizer, or DistributedDataParallel and attach(), are called. Freeze "
                    "it right after these calls, by requires_grad_(False), until it is to train"
                )

    def _trained_by(self, optimizer: torch.optim.Optimizer) -> set[int]:
        """Return the ids of the session's parameters that an optimizer has."""
        return {id(each) for each in _parameters_of(optimizer) if self._parameters.slot(each) is not None}


def check_momentum(compressor: Compressor, optimizer: torch.optim.Optimizer) -> None:
    """Refuse a momentum that would act twice."""
    momentum = compressor.traits.momentum
    if momentum > 0 and any(group.get("momentum", 0) > 0 for group in optimizer.param_groups):
        raise ValueError(
            f"the momentum {momentum} of {compressor} and the optimizer's own would act twice; set one of them to 0"
        )


def is_linear(optimizer: torch.optim.Optimizer | None) -> bool:
    """Decide whether an optimizer moves weights by multiples of its updates."""
    return isinstance(optimizer, torch.optim.SGD) and steps_as_known(type(optimizer))


def steps_as_known(kind: type) -> bool:
    """Decide whether step() of a class is one of torch's. Horovod's optimizer calls that of the class that it was made of."""
    for each in kind.__mro__:
        step = each.__dict__.get("step")
        if step is not None and not (module := inspect.unwrap(step).__module__).startswith("horovod."):
            return module in KNOWN_STEPS
    return False


def rates_of(optimizer: torch.optim.Optimizer, named: NamedParameters) -> Callable[[Sequence[str]], tuple[float, ...]]:
    """Return a function from parameters' names to their current learning rates.

    The rate is UNKNOWN for a parameter that the optimizer does not have, and where it lies on a device, which nobody is to wait
    for.
    """
    ids = {name: id(parameter) for name, parameter in named}
    # The groups' numbers, since load_state_dict() of an optimizer replaces the groups; and the sizes that the groups had.
    number_of: dict[str, int | None] = {}
    read: list[int] = []

    def rates(names: Sequence[str]) -> tuple[float, ...]:
        if (sizes := [len(group["params"]) for group in optimizer.param_groups]) != read:
            read[:] = sizes
            numbers = {id(each): i for i, group in enumerate(optimizer.param_groups) for each in group["params"]}
            number_of.update({name: numbers.get(own) for name, own in ids.items()})
        given = [group["lr"] for group in optimizer.param_groups]
        known = [UNKNOWN if isinstance(each, torch.Tensor) and each.is_cuda else float(each) for each in given]
        return tuple(UNKNOWN if (number := number_of[name]) is None else known[number] for name in names)

    return rates


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
