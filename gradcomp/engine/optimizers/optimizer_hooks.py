"""Calls around every step of any optimizer, in a fixed order: first all checks, then whatever acts on what they find."""

from __future__ import annotations

import functools
import weakref
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class StepListener(Protocol):
    """Something that is called around every step of any optimizer, as long as it lives. turn: the lowest is called first."""

    turn: ClassVar[int]

    def before_step(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        """Act before a step. closure: step() got one."""

    def after_step(self) -> None:
        """Act after a step that raised no error."""


W = TypeVar("W", bound=StepListener)

_listeners: weakref.WeakSet[Any] = weakref.WeakSet()


def add(listener: StepListener) -> None:
    """Call a listener around every step from now on."""
    _register_once()
    _listeners.add(listener)


def all_of(kind: type[W]) -> list[W]:
    """List the listeners of a class that live."""
    return [each for each in list(_listeners) if isinstance(each, kind)]


@functools.cache
def _register_once() -> None:
    """Register the hooks for good: removing one fails while torch goes through all of them, and sessions end at any time."""
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)


def _before(optimizer: torch.optim.Optimizer, args: Any, options: Any) -> None:
    closure = any(each is not None for each in (*args[1:], options.get("closure")))
    for each in sorted(_listeners, key=lambda listener: listener.turn):
        each.before_step(optimizer, closure)


def _after(optimizer: torch.optim.Optimizer, args: Any, options: Any) -> None:
    for each in list(_listeners):
        each.after_step()
