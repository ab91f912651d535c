"""Counts that all ranks act on alike: copied from the device without waiting, and used a few steps later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradcomp.core.requests import Payload

# Steps between a count and its effect.
DELAY = 8

# Receives a step's payloads. Their headers count the entries that wanted to travel.
CountObserver = Callable[[Sequence[Payload]], None]


class Counts:
    """The counts of one step, on their way to main memory."""

    def __init__(self, counts: Tensor):
        self._event: Any = None
        if counts.is_cuda:
            self._host = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
            self._host.copy_(counts, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = counts.clone()

    def largest(self) -> int:
        return int(max(self.all()))

    def all(self) -> list[float]:
        if self._event is not None:
            self._event.synchronize()  # returns at once: the copy began steps ago
            self._event = None
        return self._host.flatten().tolist()
