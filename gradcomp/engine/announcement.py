"""The line that says, once, what is exchanged."""

from __future__ import annotations

import torch

from gradcomp.engine.phases import Door
from gradcomp.engine.updates.hidden_momentum import class_of
from gradcomp.engine.updates.optimizers import Optimizers
from gradcomp.engine.updates.steps import log_on_rank_0
from gradcomp.networks import Connection


class Announcement:
    """The announcement of one session, after its first step. door: one without a name says nothing."""

    def __init__(self, door: Door, network: Connection):
        self._door, self._network = door, network
        self.is_due = bool(door.name)

    def say(self, spec: str, act: str, chooser: object = None) -> None:
        """Say it. act: what is exchanged, in words. chooser: auto's; None if the spec stays."""
        self.is_due = False
        if chooser is not None:
            act = f"begins with {spec}, and chooses after some steps"
        log_on_rank_0(f"gradcomp: {chooser or spec} over {self._door.name} {act}", self._network)


def of_updates(optimizer: torch.optim.Optimizer, optimizers: Optimizers) -> str:
    """Say what an exchange after the steps of an optimizer is."""
    name, trained = class_of(optimizer).__name__, optimizers.find(optimizer)
    holds = trained is not None and trained.momentum.rule is not None
    return f"exchanges updates after each step of {name}" + (", whose momentum is in the residual" if holds else "")
