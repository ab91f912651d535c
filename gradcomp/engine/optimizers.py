"""The optimizer behind a session: given by the user, or found at its first step; its checks, and its learning rates."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradcomp.engine.parameters import NamedParameters, Parameters
from gradcomp.protocol import Compressor


class OptimizerWatch:
    """Knows the optimizer that trains a session's parameters, or waits until one steps.

    given: the optimizer, or None. found: called with an optimizer that was not given, before its first step changes weights.
    """

    def __init__(
        self, parameters: Parameters, given: torch.optim.Optimizer | None, found: Callable[[torch.optim.Optimizer], None]
    ):
        self.optimizer: torch.optim.Optimizer | None = None
        self._parameters, self._found = parameters, found
        self._exchanged_or_foreign: set[int] = set()
        self._not_exchanged: list[torch.nn.Parameter] = []
        self._count = 0
        if given is None:
            _before_every_step(self)
        elif self._is_trained_by(given):
            self._keep(given)
        else:
            raise ValueError("optimizer= has none of the model's parameters; pass the optimizer that trains them")

    def see(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at an optimizer that is about to step."""
        if self.optimizer is None and self._is_trained_by(optimizer):
            self._found(optimizer)
            self._keep(optimizer)

    def check_all_exchanged(self) -> None:
        """Refuse a gradient of a parameter that was unfrozen or added too late: nobody exchanges it."""
        if self.optimizer is None:
            return
        if self._count != sum(len(group["params"]) for group in self.optimizer.param_groups):
            every = _parameters_of(self.optimizer)
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

    def _is_trained_by(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(self._parameters.slot(parameter) is not None for parameter in _parameters_of(optimizer))

    def _keep(self, optimizer: torch.optim.Optimizer) -> None:
        frozen = {id(parameter) for _, parameter in self._parameters.frozen}
        self.optimizer = optimizer
        self._exchanged_or_foreign = {id(parameter) for parameter in _parameters_of(optimizer)} - frozen


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


def _before_every_step(watch: OptimizerWatch) -> None:
    """Show the watch every optimizer that is about to step, as long as the watch lives."""
    watching = weakref.ref(watch)

    def show(optimizer: torch.optim.Optimizer, args: Any, options: Any) -> None:
        if (alive := watching()) is not None:
            alive.see(optimizer)

    handle = register_optimizer_step_pre_hook(show)
    weakref.finalize(watch, handle.remove)
