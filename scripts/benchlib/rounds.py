"""Fair timing on a machine that others use too: all cases in every round, the order turned each time, ratios within rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Spread(NamedTuple):
    """A measurement that was repeated."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Case:
    """Something to be timed: call(i) is timed, before(i) is not; i counts the calls, so that inputs can take turns."""

    name: str
    call: Callable[[int], object]
    bytes_moved: int | None = None  # by the contract; None where there is none
    before: Callable[[int], object] = lambda i: None


def clock(device: torch.device) -> Callable[[Callable[[], object]], float]:
    """Times one call in seconds: with the machine's clock on a CPU, with events on the stream of a GPU."""
    return _on_gpu if device.type == "cuda" else _on_cpu


def _on_cpu(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _on_gpu(call: Callable[[], object]) -> float:
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    # Work in front of the first event hides the launches behind it, so that the GPU's time is measured and not Python's.
    torch.cuda._sleep(2_000_000)
    first.record()
    call()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1000


def turned(count: int, by: int) -> list[int]:
    """0 .. count - 1, beginning elsewhere in each round."""
    return [(i + by) % count for i in range(count)]


def interleave(
    cases: Sequence[Case],
    rounds: int,
    time_of: Callable[[Callable[[], object]], float],
    progress: Callable[[int], object] = lambda done: None,
) -> dict[str, list[float]]:
    """Seconds of every case in every round. One round before them is not counted."""
    seconds: dict[str, list[float]] = {case.name: [] for case in cases}
    for i in range(rounds + 1):
        for at in turned(len(cases), i):
            case = cases[at]
            case.before(i)
            taken = time_of(lambda case=case, i=i: case.call(i))  # type: ignore[misc]
            if i > 0:
                seconds[case.name].append(taken)
        progress(i)
    return seconds


def ratio(seconds: Mapping[str, Sequence[float]], name: str, to: str) -> Spread:
    """One case's time over another's, taken within each round: what slows a whole round down leaves it alone."""
    return Spread.of([a / b for a, b in zip(seconds[name], seconds[to], strict=True)])
