"""The total time of a repeated piece of work, on a CPU or a GPU."""

from __future__ import annotations

import time
from typing import Any

import torch


class Stopwatch:
    """A context manager that adds up the time of its blocks. A GPU's time is read only when `seconds` is asked for."""

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._seconds = self._began = 0.0
        self._events: list[tuple[Any, Any]] = []

    def __enter__(self) -> None:
        self._began = time.perf_counter()
        if self._on_gpu:
            self._events.append((_record_event(), None))

    def __exit__(self, *failure: object) -> None:
        if self._on_gpu:
            self._events[-1] = (self._events[-1][0], _record_event())
        else:
            self._seconds += time.perf_counter() - self._began

    @property
    def seconds(self) -> float:
        """Return the total so far; wait for a GPU to finish its blocks."""
        for begin, end in self._events:
            end.synchronize()
            self._seconds += begin.elapsed_time(end) / 1000
        self._events.clear()
        return self._seconds


def _record_event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
