"""Payloads of entries in 16 bits, each by itself."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gradcomp.core.requests import Field, Form, Payload
from gradcomp.messages import payload as payloads
from gradcomp.native import kernels
from gradcomp.native.memory import Memory

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class HalfRounding:
    """Rounds n entries into payloads of one form, and reads them back."""

    def __init__(self, kind: str, n: int):
        self.n, self._most = n, torch.finfo(TYPES[kind]).max
        self.form: Form = (Field("header", torch.int32, 2), Field("values", TYPES[kind], n))

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

        flag: not 0 if a gradient is not finite, where those were kept out of the residual. What is too large for 16 bits then
        stays there, too. Without a flag it becomes infinite, as in a cast. bounds, key, memory: not used.
        """
        payload = payloads.empty(self.form, residual.device) if payload is None else payload
        values = self._values(payload)
        kernels.write_header(payload["header"], flag)
        if flag is None:
            values.copy_(residual)
        else:
            values.copy_(residual.clamp(-self._most, self._most))
        residual.sub_(values)
        return payload

    def add(self, target: Tensor, received: Sequence[Payload], scale: float) -> None:
        """Add scale times the entries of each payload to the target, one payload after the other."""
        for payload in received:
            target.add_(self._values(payload), alpha=scale)
            target[:1].masked_fill_(payload["header"][1:] != 0, math.nan)

    def add_and_settle(
        self, update: Tensor, received: Sequence[Payload], scale: float, residual: Tensor, payload: Payload
    ) -> None:
        """Add the payloads that were received to the update, and settle the one that this rank sent."""
        self.add(update, received, scale)
        self.settle(residual, payload, update)

    def settle(self, residual: Tensor, payload: Payload, update: Tensor) -> None:
        """Put all taken entries back if the update is not finite."""
        refused = ~update[:1].isfinite()
        if residual.is_cuda or refused:  # to ask a GPU would be to wait for it
            residual.add_(self._values(payload) * refused)

    def _values(self, payload: Payload) -> Tensor:
        return payload["values"][: self.n]
