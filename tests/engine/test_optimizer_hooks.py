"""Hooks around optimizers' steps: the lowest turn comes first, whoever was made first."""

from __future__ import annotations

from typing import Any

import torch

from gradcomp.engine.optimizers import optimizer_hooks


class Noted:
    def __init__(self, turn: int, into: list[Any]):
        self.turn, self._into = turn, into

    def before_step(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        self._into.append((self.turn, closure))

    def after_step(self) -> None:
        self._into.append("after")


def test_turns_are_kept_and_a_closure_is_seen() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))])
    for turns in ((1, 2, 3), (3, 2, 1)):
        seen: list[Any] = []
        hooked = [Noted(turn, seen) for turn in turns]
        for each in hooked:
            optimizer_hooks.add(each)  # type: ignore[arg-type]
        optimizer.step()
        optimizer.step(lambda: 0.0)
        assert seen == [(1, False), (2, False), (3, False), *["after"] * 3, (1, True), (2, True), (3, True), *["after"] * 3]
        assert optimizer_hooks.all_of(Noted) and len(optimizer_hooks.all_of(Noted)) == 3
        del each, hooked
        optimizer.step()
        assert len(seen) == 12, "what has ended is not called"
