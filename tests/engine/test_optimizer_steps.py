"""Hooks around optimizers' steps: all checks come before the first act."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from gradcomp.engine.optimizer_steps import listen


class Noted:
    """A listener. calls_once: of its view, for every optimizer."""

    def __init__(self, into: list[Any], calls_once: bool):
        self._into, self.view = into, SimpleNamespace(calls_once=lambda optimizer: calls_once, replaced=True, exchanged=False)

    def check_step(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
        self._into.append("check with closure" if has_closure else "check")

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._into.append("before")

    def after_step(self) -> None:
        self._into.append("after")


def test_checks_come_first_and_a_closure_before_all() -> None:
    optimizer, seen = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))]), list[Any]()

    def closure() -> float:
        seen.append(f"closure with grad: {torch.is_grad_enabled()}")
        return 0.5

    around = ["check"] * 3 + ["before"] * 3
    for calls_once in (False, True):
        hooked = [Noted(seen, calls_once and each == 1) for each in range(3)]
        for each in hooked:
            listen(each)
        optimizer.step()
        assert seen == around + ["after"] * 3
        for step in (lambda: optimizer.step(closure), lambda: optimizer.step(closure=closure)):
            seen.clear()
            with torch.no_grad():
                assert step() == 0.5
            called = ["closure with grad: True"]
            with_closure = [each.replace("check", "check with closure") for each in around]
            assert seen == (called + around if calls_once else with_closure + called) + ["after"] * 3
        seen.clear()
        del each, hooked
        optimizer.step()
        assert not seen, "a listener that has ended is not called"


def test_hooks_of_the_user_come_first() -> None:
    """Those that the user adds later come first, too."""
    optimizer, seen = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))]), list[Any]()
    listen(listener := Noted(seen, calls_once=False))
    wanted: list[str] = []
    for name in ("first", "second"):
        hook = optimizer.register_step_pre_hook(lambda *_, name=name: seen.append(name))  # type: ignore[misc]
        wanted.append(name)
        seen.clear()
        optimizer.step()
        assert seen == [*wanted, "check", "before", "after"]
    hook.remove()
    seen.clear()
    optimizer.step()
    assert seen == ["first", "check", "before", "after"]
    del listener
