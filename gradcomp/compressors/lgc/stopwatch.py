"""How long something takes that is done again and again, on a CPU or as work of a GPU."""

from __future__ import annotations

import time
from typing import Any

import torch


class Stopwatch:
    """Adds up what its with blocks take. On a GPU nobody waits for them until somebody asks."""

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._seconds = self._began = 0.0
        self._events: list[tuple[Any, Any]] = []

    def __enter__(self) -> None:
        self._began = time.perf_counter()
        if self._on_gpu:
            self._events.append((_mark(), None))

    def __exit__(self, *failure: object) -> None:
        if self._on_gpu:
            self._events[-1] = (self._events[-1][0], _mark())
        else:
            self._seconds += time.perf_counter() - self._began

    @property
    def seconds(self) -> float:
        """So far."""
        for begin, end in self._events:
            end.synchronize()
            self._seconds += begin.elapsed_time(end) / 1000
        self._events.clear()
        return self._seconds


def _mark() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
