"""A warning for a model that trains past its exchange: the ranks send dense gradients, or none, and nothing else shows it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import ClassVar

import torch

from gradcomp.engine.optimizers import optimizer_hooks
from gradcomp.engine.optimizers.check import OptimizerCheck
from gradcomp.engine.parameters import Parameters
from gradcomp.networks import Connection

# Steps of an optimizer without an exchange, before the warning.
STEPS_BEFORE_WARNING = 3

# Packages between a user's line and the hook.
INNER_PACKAGES = ("gradcomp", "horovod", "torch")


class Unused:
    """The steps of optimizers of some parameters before any exchange of theirs.

    spec: returns the session's. remedy: what the door's user is to do.
    """

    turn: ClassVar[int] = 3  # a step that the checks refuse does not count

    def __init__(self, parameters: Parameters, network: Connection, spec: Callable[[], str], remedy: str):
        self._parameters, self._network, self._spec, self._remedy = parameters, network, spec, remedy
        self._steps, self._inside, self._settled = 0, False, False
        optimizer_hooks.add(self)

    def before_step(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        """Count a step without an exchange; warn once of some."""
        inside, self._inside = self._inside, True  # Horovod's step() calls another one
        if self._settled or inside or not self._network.ready or self._network.world.size == 1:
            return
        every = (each for group in optimizer.param_groups for each in group["params"] if each.grad is not None)
        own = [each for each in every if self._parameters.slot(each) is not None]
        checks = [each for each in optimizer_hooks.all_of(OptimizerCheck) if each.exchanged and not each.replaced]
        if not own:
            return
        self._steps += 1
        self._settled = any(check.owns(own[0]) for check in checks)  # and no later step looks through all parameters
        if not self._settled and self._steps == STEPS_BEFORE_WARNING:
            self._settled = True
            warnings.warn(
                f"the optimizer has made {STEPS_BEFORE_WARNING} steps, and no gradient was exchanged by {self._spec()}: the "
                f"ranks send dense gradients, or none at all. {self._remedy}",
                stacklevel=_level_of_user(),
            )

    def after_step(self) -> None:
        """Note the end of a step."""
        self._inside = False


def _level_of_user() -> int:
    """Return the stack level, for a warning of the caller's, of the line that called the optimizer's step()."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in INNER_PACKAGES:
        frame, level = frame.f_back, level + 1
    return level
