"""Hooks around optimizers' steps: all checks come before the first act."""

from __future__ import annotations

from typing import Any

import torch

from gradcomp.engine.optimizer_steps import listen


class Noted:
    def __init__(self, into: list[Any]):
        self._into = into

    def check_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._into.append("check")

    def before_step(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        self._into.append(closure)

    def after_step(self) -> None:
        self._into.append("after")


def test_checks_come_first_and_a_closure_is_seen() -> None:
    optimizer, seen = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))]), list[Any]()
    hooked = [Noted(seen) for _ in range(3)]
    for each in hooked:
        listen(each)
    optimizer.step()
    optimizer.step(lambda: 0.0)
    assert seen == ["check"] * 3 + [False] * 3 + ["after"] * 3 + ["check"] * 3 + [True] * 3 + ["after"] * 3
    del each, hooked
    optimizer.step()
    assert len(seen) == 18, "a listener that has ended is not called"
