"""Payloads of rounded entries: in 16 bits each, in blocks with a budget of bits, or a few levels of each group and codes."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradcomp.core.requests import Field, Form, Payload
from gradcomp.messages import payload as payloads
from gradcomp.native import kernels
from gradcomp.native.extension import MOST_RANKS
from gradcomp.native.memory import Memory

# The types of 16 bits, by the knob's values.
HALF_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Rounding(ABC):
    """A way to round n entries into payloads of one form, and to read them back. payload["header"][1] is their flag."""

    form: Form

    def take(
        self,
        residual: Tensor,
        bounds: Tensor | None,
        flag: Tensor | None,
        key: int,
        payload: Payload | None = None,
        memory: Memory | None = None,
    ) -> Payload:
        """Move the rounded entries out of the residual into a payload; the rounding error stays.

        bounds: the lowest and the highest value of each group; None = unbounded. flag: not 0 if a gradient is not finite.
        key: seeds the random rounding. payload: the payload to fill, of this form or larger; None = a new one.
        memory: lends scratch.
        """
        payload = payloads.empty(self.form, residual.device) if payload is None else payload
        self._fill(payload, residual, bounds, flag, key, memory)
        return payload

    @abstractmethod
    def _fill(
        self, payload: Payload, residual: Tensor, bounds: Tensor | None, flag: Tensor | None, key: int, memory: Memory | None
    ) -> None: ...

    @abstractmethod
    def add(self, target: Tensor, received: Sequence[Payload], scale: float) -> None:
        """Add scale times the entries of each payload to the target, one payload after the other."""

    @abstractmethod
    def settle(self, residual: Tensor, payload: Payload, update: Tensor) -> None:
        """Put all taken entries back if the update is not finite."""

    def add_and_settle(
        self,
        update: Tensor,
        received: Sequence[Payload],
        scale: float,
        residual: Tensor,
        payload: Payload,
        memory: Memory | None = None,
    ) -> None:
        """Add the payloads that were received to the update, and settle the one that this rank sent."""
        self.add(update, received, scale)
        self.settle(residual, payload, update)


class HalfRounding(Rounding):
    """Sends entries in 16 bits, each by itself."""

    def __init__(self, kind: str, n: int):
        self.n, self._most = n, torch.finfo(HALF_TYPES[kind]).max
        self.form: Form = (Field("header", torch.int32, 2), Field("values", HALF_TYPES[kind], n))

    def _fill(
        self, payload: Payload, residual: Tensor, bounds: Tensor | None, flag: Tensor | None, key: int, memory: Memory | None
    ) -> None:
        # With a flag, entries too large for 16 bits stay in the residual. Without one they become infinite, as in a cast.
        values = self._values(payload)
        kernels.write_header(payload["header"], flag)
        values.copy_(residual if flag is None else residual.clamp(-self._most, self._most))
        residual.sub_(values)

    def add(self, target: Tensor, received: Sequence[Payload], scale: float) -> None:
        for payload in received:
            target.add_(self._values(payload), alpha=scale)
            target[:1].masked_fill_(payload["header"][1:] != 0, math.nan)

    def settle(self, residual: Tensor, payload: Payload, update: Tensor) -> None:
        refused = ~update[:1].isfinite()
        if residual.is_cuda or refused:  # to ask a GPU would be to wait for it
            residual.add_(self._values(payload) * refused)

    def _values(self, payload: Payload) -> Tensor:
        return payload["values"][: self.n]


class BlockRounding(Rounding):
    """Sends entries within a budget of bits for each block: a scale for 32 entries, and more bits where the scale is larger."""

    def __init__(self, bits: int, n: int):
        self.bits = bits
        self.form: Form = (Field("header", torch.int32, 2), Field("words", torch.int32, kernels.block_words(n, bits)))

    def _fill(
        self, payload: Payload, residual: Tensor, bounds: Tensor | None, flag: Tensor | None, key: int, memory: Memory | None
    ) -> None:
        own = payload.bytes if payload.form == self.form else self._bytes(payload)
        kernels.take_blocks(residual, self.bits, own, flag)

    def add(self, target: Tensor, received: Sequence[Payload], scale: float) -> None:
        kernels.add_blocks(target, [*map(self._bytes, received)], self.bits, scale)

    def add_and_settle(
        self,
        update: Tensor,
        received: Sequence[Payload],
        scale: float,
        residual: Tensor,
        payload: Payload,
        memory: Memory | None = None,
    ) -> None:
        if len(received) > MOST_RANKS:
            return super().add_and_settle(update, received, scale, residual, payload)
        is_whole = payload.form == self.form  # and not that of a larger part
        sent = [payload.bytes for payload in received] if is_whole else [*map(self._bytes, received)]
        own = payload.bytes if is_whole else self._bytes(payload)
        return kernels.add_and_settle_blocks(update, sent, self.bits, scale, residual, own, memory)

    def settle(self, residual: Tensor, payload: Payload, update: Tensor) -> None:
        kernels.settle_blocks(residual, self._bytes(payload), self.bits, update)

    def read(self, payload: Payload, to: Sequence[Tensor]) -> None:
        """Write the entries into tensors of any type, one after the other. NaN stands for what is not finite or malformed."""
        kernels.read_blocks(self._bytes(payload), self.bits, to)

    def _bytes(self, payload: Payload) -> Tensor:
        return payload.bytes[: payloads.size(self.form)]


@dataclass(frozen=True)
class RoundingRule:
    """The way a group of entries is rounded.

    kind: the rule that finds the levels, one of kernels.LEVEL_RULES. count: levels of a group: 2, 3, 5 or 9. group: entries
    that share levels. stochastic: entries are rounded at random, without bias. sent: the levels that travel. "all"; or "top",
    if levels are spread evenly about 0; or "ends", if they are spread evenly between the lowest and the highest.
    """

    kind: str
    count: int
    group: int
    stochastic: bool = True
    sent: Literal["all", "top", "ends"] = "all"


class LevelRounding(Rounding):
    """Sends a few levels of each group, and for each entry the number of its level."""

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

    def _fill(
        self, payload: Payload, residual: Tensor, bounds: Tensor | None, flag: Tensor | None, key: int, memory: Memory | None
    ) -> None:
        rule, device = self.rule, residual.device
        if self._is_whole(payload):
            sizes = rule.group, rule.count
            kernels.find_and_take_levels(residual, rule.kind, *sizes, key, payload.bytes, rule.stochastic, bounds, flag, memory)
            return
        levels = torch.empty(self.groups * rule.count, device=device)
        cuts = torch.empty(self.groups, device=device)
        kernels.find_levels(residual, rule.kind, rule.group, rule.count, levels, cuts, bounds)
        rows = levels.view(self.groups, rule.count)
        sent = {"all": rows, "top": rows[:, -1:], "ends": rows[:, :: rule.count - 1]}[rule.sent]
        payload["levels"][: self.sent_levels].copy_(sent.flatten())
        kernels.write_header(payload["header"], flag)
        fixed_cuts = None if rule.stochastic else cuts
        kernels.take_levels(residual, self._levels(payload), rule.group, rule.count, key, self._words(payload), fixed_cuts)

    def add(self, target: Tensor, received: Sequence[Payload], scale: float) -> None:
        levels, words = [*map(self._levels, received)], [*map(self._words, received)]
        headers = [payload["header"] for payload in received]
        kernels.add_levels(target, levels, words, headers, self.rule.group, self.rule.count, scale)

    def add_and_settle(
        self,
        update: Tensor,
        received: Sequence[Payload],
        scale: float,
        residual: Tensor,
        payload: Payload,
        memory: Memory | None = None,
    ) -> None:
        if len(received) <= MOST_RANKS and self._is_whole(payload) and all(map(self._is_whole, received)):
            sent, rule = [each.bytes for each in received], self.rule
            kernels.add_and_settle_levels(update, sent, rule.group, rule.count, scale, residual, payload.bytes, memory)
        else:
            super().add_and_settle(update, received, scale, residual, payload)

    def settle(self, residual: Tensor, payload: Payload, update: Tensor) -> None:
        kernels.settle_levels(residual, self._levels(payload), self._words(payload), self.rule.group, self.rule.count, update)

    def _is_whole(self, payload: Payload) -> bool:
        """Decide whether kernels can have the bytes as they are: all levels travel, and no array is longer than needed."""
        return self.rule.sent == "all" and (payload.form is self.form or payload.form == self.form)

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
