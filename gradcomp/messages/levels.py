"""Payloads of rounded entries: each group of entries has a few levels, and each entry travels as the number of its level."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradcomp.messages import payload as payloads
from gradcomp.native import kernels
from gradcomp.requests import Field, Form, Payload


@dataclass(frozen=True)
class RoundingRule:
    """The way a group of entries is rounded.

    kind: the rule that finds the levels, one of kernels.LEVEL_RULES. count: levels of a group: 2, 3, 5 or 9.
    group: entries that share levels. stochastic: entries are rounded at random, without bias.
    sent: the levels that travel. "all"; or "top", if levels are spread evenly about 0; or "ends", if they are spread evenly
    between the lowest and the highest.
    """

    kind: str
    count: int
    group: int
    stochastic: bool = True
    sent: Literal["all", "top", "ends"] = "all"


class LevelRounding:
    """Rounds n entries into payloads of one form, and reads them back."""

    def __init__(self, rule: RoundingRule, n: int):
        self.rule = rule
        self.groups = kernels.groups(n, rule.group)
        self.sent_per_group = {"all": rule.count, "top": 1, "ends": 2}[rule.sent]
        self.sent_levels = self.groups * self.sent_per_group
        self.form: Form = (
            Field("header", torch.int32, 2),
            Field("levels", torch.float32, self.sent_levels),
            Field("words", torch.int64, kernels.words(n, rule.group, rule.count)),
        )

    def take(
        self, residual: Tensor, bounds: Tensor | None, flag: Tensor | None, key: int, payload: Payload | None = None
    ) -> Payload:
        """Move the rounded entries out of the residual into a payload; the rounding error stays.

        bounds: the lowest and the highest value of each group; None = unbounded. flag: not 0 if a gradient is not finite.
        key: seeds the random rounding. payload: the payload to fill, of this form or larger; None = a new one.
        """
        rule, device = self.rule, residual.device
        payload = payloads.empty(self.form, device) if payload is None else payload
        levels = torch.empty(self.groups * rule.count, device=device)
        cuts = torch.empty(self.groups, device=device)
        kernels.find_levels(residual, rule.kind, rule.group, rule.count, levels, cuts, bounds)
        rows = levels.view(self.groups, rule.count)
        sent = {"all": rows, "top": rows[:, -1:], "ends": rows[:, :: rule.count - 1]}[rule.sent]
        payload["levels"][: self.sent_levels].copy_(sent.flatten())
        payload["header"].zero_()
        if flag is not None:
            payload["header"][1:].copy_(flag)
        fixed_cuts = None if rule.stochastic else cuts
        kernels.take_levels(residual, self._levels(payload), rule.group, rule.count, key, self._words(payload), fixed_cuts)
        return payload

    def add(self, target: Tensor, received: Sequence[Payload], scale: float) -> None:
        """Add scale times the entries of each payload to the target, one payload after the other."""
        levels, words = [*map(self._levels, received)], [*map(self._words, received)]
        headers = [payload["header"] for payload in received]
        kernels.add_levels(target, levels, words, headers, self.rule.group, self.rule.count, scale)

    def settle(self, residual: Tensor, payload: Payload, update: Tensor) -> None:
        """Put all taken entries back if the update is not finite."""
        kernels.settle_levels(residual, self._levels(payload), self._words(payload), self.rule.group, self.rule.count, update)

    def _words(self, payload: Payload) -> Tensor:
        return payload["words"][: self.form[-1].length]

    def _levels(self, payload: Payload) -> Tensor:
        """Rebuild all levels from those that travel."""
        sent = payload["levels"][: self.sent_levels]
        if self.rule.sent == "all":
            return sent
        share = torch.linspace(0, 1, self.rule.count, device=sent.device)
        ends = sent.view(self.groups, self.sent_per_group)
        low = -ends if self.rule.sent == "top" else ends[:, :1]
        return (low * (1 - share) + ends[:, -1:] * share).flatten()


@functools.cache
def rounding_error(rule: RoundingRule, sigmas: float) -> float:
    """Measure the relative squared error of rounding normally distributed entries.

    sigmas: standard deviations from 0 at which entries are clipped before they are rounded; 0 = no clipping.
    """
    residual = torch.randn(rule.group, generator=torch.Generator().manual_seed(0))
    squares = residual.square().sum()
    limit = sigmas * residual.std(0, correction=0, keepdim=True)
    bounds = torch.stack([-limit, limit], 1).flatten() if sigmas else None
    LevelRounding(rule, rule.group).take(residual, bounds, None, key=0)
    return float(residual.square().sum() / squares)
