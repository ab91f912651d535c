"""A warning for a model that trains without its exchange: the ranks send dense gradients, or none, and no error shows it."""

from __future__ import annotations

import sys
import warnings

import torch

from gradcomp.engine import optimizer_hooks
from gradcomp.engine.slots import Slots
from gradcomp.networks import Connection

# Steps of an optimizer without an exchange, before the warning.
STEPS_BEFORE_WARNING = 3

# Packages between a user's line and the hook.
INNER_PACKAGES = ("gradcomp", "horovod", "torch")


class MissingExchange:
    """The steps of optimizers of some parameters before any exchange of theirs. remedy: advice for the door's user."""

    def __init__(self, slots: Slots, network: Connection, remedy: str):
        self._slots, self._network, self._remedy = slots, network, remedy
        self._steps, self._inside, self._settled = 0, False, False

    def before_step(self, optimizer: torch.optim.Optimizer, spec: str) -> None:
        """Count a step without an exchange; warn once of some."""
        inside, self._inside = self._inside, True  # Horovod's step() calls another one
        if self._settled or inside or not self._network.ready or self._network.world.size == 1:
            return
        every = (each for group in optimizer.param_groups for each in group["params"] if each.grad is not None)
        own = [each for each in every if self._slots.slot(each) is not None]
        if not own:
            return
        self._steps += 1
        views = [each.view for each in optimizer_hooks.listeners()]
        # No later step then looks through all parameters.
        self._settled = any(view.exchanged and not view.replaced and view.owns(own[0]) for view in views)
        if not self._settled and self._steps == STEPS_BEFORE_WARNING:
            self._settled = True
            warnings.warn(
                f"the optimizer has made {STEPS_BEFORE_WARNING} steps, and no gradient was exchanged by {spec}: the ranks send "
                f"dense gradients, or none at all. {self._remedy}",
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
