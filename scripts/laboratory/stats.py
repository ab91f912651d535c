"""Arithmetic of measurements: standard errors, bounds of paired differences and of medians, and smoothed curves."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

# The confidence of a one-sided bound.
CONFIDENCE = 0.95

# Steps that one point of a smoothed curve averages.
SMOOTHED = 10


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
