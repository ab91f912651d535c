"""Fair timing on a shared machine, and bounds: rounds time all cases, their order rotates, ratios are taken within rounds."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

# The confidence of a one-sided bound.
CONFIDENCE = 0.95

# Steps that one point of a smoothed curve averages.
SMOOTHED = 10


class Spread(NamedTuple):
    """Median and range of a repeated measurement."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise the values."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Case:
    """A call to time. call(i) is timed, before(i) is not; i counts the calls, so that inputs can take turns.

    bytes_moved: by the contract in csrc/ops.inc; None where there is no contract.
    """

    name: str
    call: Callable[[int], object]
    bytes_moved: int | None = None
    before: Callable[[int], object] = lambda i: None


def clock(device: torch.device) -> Callable[[Callable[[], object]], float]:
    """Return a function that times one call in seconds: by the machine's clock on a CPU, by events on a GPU's stream."""
    return _on_gpu if device.type == "cuda" else _on_cpu


def _on_cpu(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _on_gpu(call: Callable[[], object]) -> float:
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    # Work before the first event hides the launches, so that the GPU's time is measured and not Python's.
    torch.cuda._sleep(2_000_000)
    first.record()
    call()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1000


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch use so many threads, and as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def rotated(count: int, by: int) -> list[int]:
    """Return 0 .. count - 1, rotated."""
    return [(i + by) % count for i in range(count)]


def interleave(
    cases: Sequence[Case],
    rounds: int,
    time_of: Callable[[Callable[[], object]], float],
    progress: Callable[[int], object] = lambda done: None,
) -> dict[str, list[float]]:
    """Return the seconds of every case in every round. One round before them does not count."""
    seconds: dict[str, list[float]] = {case.name: [] for case in cases}
    for i in range(rounds + 1):
        for at in rotated(len(cases), i):
            case = cases[at]
            case.before(i)
            taken = time_of(lambda case=case, i=i: case.call(i))  # type: ignore[misc]
            if i > 0:
                seconds[case.name].append(taken)
        progress(i)
    return seconds


def ratio(seconds: Mapping[str, Sequence[float]], name: str, to: str) -> Spread:
    """Divide one case's time by another's, round by round: a disturbance of a whole round cancels."""
    return Spread.of([a / b for a, b in zip(seconds[name], seconds[to], strict=True)])


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean; NaN if a value is not finite, or there is one only."""
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return math.nan
    return statistics.stdev(values) / math.sqrt(len(values))


def upper_bound(differences: Sequence[float]) -> float:
    """Bound the true mean of these differences from above with 95 % confidence: one-sided, by Student's t. NaN for one."""
    from scipy.stats import t

    if len(differences) < 2:
        return math.nan
    quantile = float(t.ppf(CONFIDENCE, len(differences) - 1))
    return statistics.fmean(differences) + quantile * standard_error(differences)


def median_bounds(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Bound the true median of these values from below and from above, each with 95 % confidence, whatever their law.

    The k-th of n values is above the median with the probability that at most k - 1 of n coins show heads. There is no bound
    for too few values.
    """
    ordered, n = sorted(values), len(values)
    below, k = 0.0, 0
    while k < n and (below := below + math.comb(n, k) / 2**n) <= 1 - CONFIDENCE:
        k += 1
    return (ordered[k - 1], ordered[n - k]) if k else (None, None)


def smooth(curve: Sequence[float], over: int = SMOOTHED) -> list[float]:
    """Average each step with the few before it."""
    return [statistics.fmean(curve[max(0, i + 1 - over) : i + 1]) for i in range(len(curve))]
