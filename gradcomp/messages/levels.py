"""Payloads of entries that are rounded to a few levels: a group of entries has levels, and each entry the number of one."""

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
class Rule:
    """How a group is rounded.

    form: what its levels follow from, one of kernels.FORMS. count: how many there are: 2, 3, 5 or 9.
    group: entries that share them. drawn: whether entries are rounded at random.
    travels: which levels do: all; the top one, of levels spread evenly about 0; the ends, where they are spread between them.
    """

    form: str
    count: int
    group: int
    drawn: bool = True
    travels: Literal["all", "top", "ends"] = "all"


class Rounding:
    """The payload of so many entries, and what is done with it."""

    def __init__(self, rule: Rule, n: int):
        self.rule = rule
        self.groups = kernels.groups(n, rule.group)
        self.each = {"all": rule.count, "top": 1, "ends": 2}[rule.travels]
        self.form: Form = (
            Field("header", torch.int32, 2),
            Field("levels", torch.float32, self.groups * self.each),
            Field("words", torch.int64, kernels.words(n, rule.group, rule.count)),
        )

    def take(
        self, residual: Tensor, bounds: Tensor | None, flag: Tensor | None, key: int, payload: Payload | None = None
    ) -> Payload:
        """Round the residual, which keeps what that leaves over; payload: to be filled, of this form or with more room."""
        rule, device = self.rule, residual.device
        payload = payloads.empty(self.form, device) if payload is None else payload
        levels = torch.empty(self.groups * rule.count, device=device)
        cuts = torch.empty(self.groups, device=device)
        kernels.find_levels(residual, rule.form, rule.group, rule.count, levels, cuts, bounds)
        rows = levels.view(self.groups, rule.count)
        chosen = {"all": rows, "top": rows[:, -1:], "ends": rows[:, :: rule.count - 1]}[rule.travels]
        payload["levels"][: self.groups * self.each].copy_(chosen.flatten())
        payload["header"].zero_()
        if flag is not None:
            payload["header"][1:].copy_(flag)
        by = None if rule.drawn else cuts
        kernels.take_levels(residual, self._levels(payload), rule.group, rule.count, key, self._words(payload), by)
        return payload

    def add(self, target: Tensor, came: Sequence[Payload], scale: float) -> None:
        """target += scale * what payloads say, one after the other."""
        levels, words = [*map(self._levels, came)], [*map(self._words, came)]
        headers = [payload["header"] for payload in came]
        kernels.add_levels(target, levels, words, headers, self.rule.group, self.rule.count, scale)

    def settle(self, residual: Tensor, payload: Payload, update: Tensor) -> None:
        """Put what was taken back where the update is not finite."""
        kernels.settle_levels(residual, self._levels(payload), self._words(payload), self.rule.group, self.rule.count, update)

    def _words(self, payload: Payload) -> Tensor:
        return payload["words"][: self.form[-1].length]

    def _levels(self, payload: Payload) -> Tensor:
        """All levels, of those that travel."""
        sent = payload["levels"][: self.groups * self.each]
        if self.rule.travels == "all":
            return sent
        share = torch.linspace(0, 1, self.rule.count, device=sent.device)
        ends = sent.view(self.groups, self.each)
        low = -ends if self.rule.travels == "top" else ends[:, :1]
        return (low * (1 - share) + ends[:, -1:] * share).flatten()


@functools.cache
def error_of(rule: Rule, sigmas: float) -> float:
    """What rounding leaves of a group of normal entries, as a share of their squares.

    sigmas: entries count as if they lay within so many standard deviations of 0; 0 = as they are.
    """
    residual = torch.randn(rule.group, generator=torch.Generator().manual_seed(0))
    whole = residual.square().sum()
    most = sigmas * residual.std(0, correction=0, keepdim=True)
    bounds = torch.stack([-most, most], 1).flatten() if sigmas else None
    Rounding(rule, rule.group).take(residual, bounds, None, key=0)
    return float(residual.square().sum() / whole)
