"""Hooks around the steps of any optimizer: the first act before them and after them, also within closures."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradcomp.engine.updates.steps import ignore, listen


class Noted:
    """A listener."""

    def __init__(self, into: list[Any]):
        self._into = into

    def before(self, optimizer: torch.optim.Optimizer, has_closure: bool = False) -> None:
        self._into.append("before")

    def after(self, optimizer: torch.optim.Optimizer) -> None:
        self._into.append("after")

    def show(self, optimizer: torch.optim.Optimizer) -> None:
        self._into.append("show")

    def hide(self, optimizer: torch.optim.Optimizer) -> None:
        self._into.append("hide")


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))])


def test_every_step_of_any_optimizer_is_seen_as_long_as_a_listener_lives() -> None:
    seen = list[Any]()
    listeners = [Noted(seen) for _ in range(3)]
    for each in listeners:
        listen(each)
    sgd().step()
    assert seen == ["before"] * 3 + ["after"] * 3
    seen.clear()
    ignore(listeners[0])
    ignore(listeners[0])
    sgd().step()
    assert seen == ["before"] * 2 + ["after"] * 2
    seen.clear()
    del each, listeners
    sgd().step()
    assert not seen


def test_a_closure_runs_within_the_step_with_gradients_enabled() -> None:
    optimizer, seen = sgd(), list[Any]()
    listen(listener := Noted(seen))

    def closure() -> float:
        seen.append(torch.is_grad_enabled())
        return 0.5

    for step in (lambda: optimizer.step(closure), lambda: optimizer.step(closure=closure)):
        seen.clear()
        with torch.no_grad():
            assert step() == 0.5
        assert seen == ["before", True, "after"]
    del listener


def test_hooks_of_the_user_act_on_the_weights_of_all_ranks() -> None:
    """Before the exchange begins, and after it has ended; also those that come later."""
    optimizer, seen = sgd(), list[Any]()
    listen(listener := Noted(seen))
    for name in ("first", "second"):
        optimizer.register_step_pre_hook(lambda *_, name=name: seen.append(f"pre {name}"))  # type: ignore[misc]
        optimizer.register_step_post_hook(lambda *_, name=name: seen.append(f"post {name}"))  # type: ignore[misc]
        optimizer.step()
        seen.clear()
        optimizer.step()
    assert seen == ["pre first", "pre second", "before", "after", "post first", "post second"]
    del listener


def test_a_step_that_fails_and_a_state_that_is_saved_show_all_settings() -> None:
    optimizer, seen = sgd(), list[Any]()
    listen(listener := Noted(seen))

    def closure() -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(closure)
    assert seen == ["before", "show"]
    optimizer.state_dict()
    assert seen == ["before", "show", "show", "hide"]
    del listener
