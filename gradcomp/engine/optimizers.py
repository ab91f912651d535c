"""The optimizer behind a session: given by the user, or found at its first step; its checks, and its learning rates."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradcomp.engine.parameters import NamedParameters, Parameters, check_optimizer
from gradcomp.protocol import Compressor

# All watches that live. torch calls _show before every step of any optimizer, once there has been a watch.
_watches: weakref.WeakSet[OptimizerWatch] = weakref.WeakSet()


class OptimizerWatch:
    """Knows the optimizer that trains a session's parameters, or waits until one steps.

    given: the optimizer, or None. check: called with an optimizer that was not given, before its first step changes weights.
    before_step: called before each step of an optimizer of the parameters.
    An optimizer that steps with the same parameters replaces the given one: hvd.DistributedOptimizer makes another object.
    expects_step: gradients were exchanged since the last step. Steps of a model whose session was replaced are left alone.
    """

    def __init__(
        self,
        parameters: Parameters,
        given: torch.optim.Optimizer | None,
        check: Callable[[torch.optim.Optimizer], None],
        before_step: Callable[[], None] = lambda: None,
    ):
        self.optimizer: torch.optim.Optimizer | None = None
        self.expects_step = False
        self._parameters, self._check, self._before_step = parameters, check, before_step
        self._trained: set[int] = set()
        self._not_exchanged: list[torch.nn.Parameter] = []
        self._count = 0
        if given is not None:
            check_optimizer(given)
            if not self._trained_by(given):
                raise ValueError("optimizer= has none of the model's parameters; pass the optimizer that trains them")
            self._keep(given)
        _register_once()
        _watches.add(self)

    def see(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at an optimizer that is about to step."""
        if not self.expects_step:
            return
        if optimizer is not self.optimizer:
            trained = self._trained_by(optimizer)
            if not trained or not trained >= self._trained:
                return
        self._before_step()
        if optimizer is not self.optimizer:
            self._check(optimizer)
            self._keep(optimizer)
        self._check_all_exchanged(optimizer)
        self.expects_step = False

    def rate(self, name: str) -> float:
        """Return the current learning rate of a parameter. The optimizer must be known."""
        return self._rate(name)

    def _check_all_exchanged(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse a gradient of a parameter that was unfrozen or added too late: nobody exchanges it."""
        if self._count != sum(len(group["params"]) for group in optimizer.param_groups):
            every = _parameters_of(optimizer)
            self._count = len(every)
            self._not_exchanged = [each for each in every if id(each) not in self._exchanged_or_foreign]
        for parameter in self._not_exchanged:
            if parameter.requires_grad and parameter.grad is not None:
                name = next((repr(name) for name, frozen in self._parameters.frozen if frozen is parameter), "a parameter")
                raise RuntimeError(
                    f"{name} of shape {tuple(parameter.shape)} was unfrozen or added after the ranks' exchange was set up: its "
                    "gradient stays on this rank, and the replicas drift apart. Make the distributed optimizer or the "
                    "DistributedDataParallel model, and gradcomp's part of it, again after such a change"
                )

    def _trained_by(self, optimizer: torch.optim.Optimizer) -> set[int]:
        """Return the ids of the session's parameters that an optimizer has."""
        return {id(each) for each in _parameters_of(optimizer) if self._parameters.slot(each) is not None}

    def _keep(self, optimizer: torch.optim.Optimizer) -> None:
        if self.optimizer is None:
            frozen = {id(parameter) for _, parameter in self._parameters.frozen}
            self._exchanged_or_foreign = {id(parameter) for parameter in _parameters_of(optimizer)} - frozen
        self.optimizer, self._trained = optimizer, self._trained_by(optimizer)
        self._rate = rates_of(optimizer, [(slot.name, slot.parameter) for slot in self._parameters.slots])


def check_momentum(compressor: Compressor, optimizer: torch.optim.Optimizer) -> None:
    """Refuse a momentum that would act twice."""
    momentum = compressor.traits.momentum
    if momentum > 0 and any(group.get("momentum", 0) > 0 for group in optimizer.param_groups):
        raise ValueError(
            f"the momentum {momentum} of {compressor} and the optimizer's own would act twice; set one of them to 0"
        )


def rates_of(optimizer: torch.optim.Optimizer, named: NamedParameters) -> Callable[[str], float]:
    """Return a function from a parameter's name to its current learning rate."""
    # The groups' numbers, since load_state_dict() of an optimizer replaces the groups.
    numbers = {id(parameter): i for i, group in enumerate(optimizer.param_groups) for parameter in group["params"]}
    number_of = {name: numbers.get(id(parameter)) for name, parameter in named}

    def rate(name: str) -> float:
        number = number_of[name]
        if number is None:
            raise ValueError(f"optimizer= does not have the parameter {name!r}; pass the optimizer of all parameters")
        return float(optimizer.param_groups[number]["lr"])

    return rate


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@functools.cache
def _register_once() -> None:
    """Register the hook for good: removing one fails while torch goes through all of them, and watches end at any time."""
    register_optimizer_step_pre_hook(_show)


def _show(optimizer: torch.optim.Optimizer, args: Any, options: Any) -> None:
    for watch in list(_watches):
        watch.see(optimizer)
