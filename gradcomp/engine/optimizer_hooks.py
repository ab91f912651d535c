"""Calls around every step of any optimizer: first all checks, then all acts."""

from __future__ import annotations

import functools
import weakref
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class StepListener(Protocol):
    """A listener to every step of any optimizer, as long as it lives: a session, or a simulation."""

    # Its view of the optimizer that it belongs to.
    view: Any

    def check_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Check an optimizer that is about to step, before any listener acts."""

    def before_step(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        """Act before a step. closure: step() got one."""

    def after_step(self) -> None:
        """Act after a step that raised no error."""


_listeners: weakref.WeakSet[Any] = weakref.WeakSet()


def listen(listener: StepListener) -> None:
    """Call a listener around every step from now on."""
    _register_once()
    _listeners.add(listener)


def listeners() -> list[StepListener]:
    """List all listeners that live."""
    return list(_listeners)


@functools.cache
def _register_once() -> None:
    """Register the hooks for good: removing one fails while torch goes through all of them, and sessions end at any time."""
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)


def _before(optimizer: torch.optim.Optimizer, args: Any, options: Any) -> None:
    closure = any(each is not None for each in (*args[1:], options.get("closure")))
    every = listeners()
    for each in every:
        each.check_step(optimizer)
    for each in every:
        each.before_step(optimizer, closure)


def _after(optimizer: torch.optim.Optimizer, args: Any, options: Any) -> None:
    for each in listeners():
        each.after_step()
