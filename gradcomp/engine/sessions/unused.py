"""A warning for a model that trains past its exchange: the ranks send dense gradients, or none, and nothing else shows it."""

from __future__ import annotations

import sys
import warnings
import weakref
from typing import ClassVar

import torch

from gradcomp.engine.optimizers import optimizer_hooks
from gradcomp.engine.sessions.session import Session

# Steps of an optimizer without an exchange, before the warning.
SOME = 3

# Packages between a user's line and the hook.
BETWEEN = ("gradcomp", "horovod", "torch")


class Unused:
    """Looks at the first steps of any optimizer of a session's parameters. remedy: what the door's user is to do."""

    turn: ClassVar[int] = 3  # a step that the checks refuse does not count

    def __init__(self, session: Session, remedy: str):
        self._session, self._remedy = weakref.ref(session), remedy
        self._steps, self._inside = 0, False
        optimizer_hooks.add(self)

    def before_step(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        """Count a step without an exchange; warn once of some."""
        session = self._session()
        inside, self._inside = self._inside, True  # Horovod's step() calls another one
        if self._steps == SOME or inside or session is None or session.reducer.steps_done > 0:
            return
        if not session.network.ready or session.network.world.size == 1:
            return
        every = (each for group in optimizer.param_groups for each in group["params"] if each.grad is not None)
        if any(session.parameters.slot(each) is not None for each in every):
            self._steps += 1
            if self._steps == SOME:
                self._warn(session.spec)

    def after_step(self) -> None:
        """Note the end of a step."""
        self._inside = False

    def _warn(self, spec: str) -> None:
        warnings.warn(
            f"the optimizer has made {SOME} steps, and no gradient was exchanged by {spec}: the ranks send dense gradients, or "
            f"none at all. {self._remedy}",
            stacklevel=_level_of_user(),
        )


def _level_of_user() -> int:
    """Return the stack level, for a warning of the caller's, of the line that called the optimizer's step()."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in BETWEEN:
        frame, level = frame.f_back, level + 1
    return level
