"""Steps of an optimizer that LocalSteps does not take: a program that takes all of them so never synchronizes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gradcomp.engine.updates.steps import warn_user

# The steps, without one of LocalSteps between them, after which it warns.
MOST = 3
_OUTSIDE = (
    f"{{name}} has taken {MOST} steps outside LocalSteps, which does not count them: the ranks train apart, and do not "
    "synchronize. Call local.step() in place of optimizer.step(), and scaler.step(local) in place of scaler.step(optimizer)"
)


class OutsideSteps:
    """Counts them, by a hook on the optimizer, as long as this object lives.

    count: since the last step of LocalSteps.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self._is_inside, self.count, self._is_paused = False, 0, False
        hooks: dict[int, Any] | None = getattr(optimizer, "_optimizer_step_post_hooks", None)
        if hooks is not None:  # a wrapper of a trainer may have none
            for key in [key for key, each in hooks.items() if isinstance(each, _Hook)]:
                del hooks[key]  # an earlier LocalSteps'
            optimizer.register_step_post_hook(_Hook(self))

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Take a step of LocalSteps."""
        self._is_inside, self.count, self._is_paused = True, 0, False
        try:
            yield
        finally:
            self._is_inside = False

    def pause(self) -> None:
        """Count none until the next step of LocalSteps: ranks are equal, and a program may go on without it."""
        self._is_paused = True

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        """Note a step."""
        if self._is_inside or self._is_paused:
            return
        self.count += 1
        if self.count == MOST:
            warn_user(_OUTSIDE.format(name=type(optimizer).__name__))


class _Hook:
    """The hook after steps. That of a copied optimizer does nothing."""

    def __init__(self, of: OutsideSteps | None):
        self._of = (lambda: None) if of is None else weakref.ref(of)

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, options: Any) -> None:
        if (of := self._of()) is not None:
            of.note(optimizer)

    def __deepcopy__(self, memo: Any) -> _Hook:
        return _Hook(None)
