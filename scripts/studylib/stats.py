"""The study's arithmetic: Student's t, the bound of paired differences, smoothed curves, and the step that reaches a loss."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

CONFIDENCE = 0.95
SMOOTHED = 10
"""Steps whose mean is one point of a smoothed curve."""


def t_probability(t: float, freedom: int) -> float:
    """P(T <= t) of Student's t with a whole number of degrees of freedom, which has a closed form in an angle."""
    angle = math.atan2(t, math.sqrt(freedom))
    cosine = math.cos(angle)
    term = total = 1.0 if freedom % 2 == 0 else cosine
    for i in range(2 + freedom % 2, freedom, 2):
        term *= cosine**2 * (i - 1) / i
        total += term
    if freedom % 2 == 0:
        return (1 + math.sin(angle) * total) / 2
    return 0.5 + (angle + (math.sin(angle) * total if freedom > 1 else 0.0)) / math.pi


def t_quantile(probability: float, freedom: int) -> float:
    """The t that T stays below with this probability, at least one half; by halving an interval."""
    low, high = 0.0, 1.0
    while t_probability(high, freedom) < probability:
        high *= 2
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if t_probability(middle, freedom) < probability else (low, middle)
    return high


def standard_error(values: Sequence[float]) -> float:
    if not all(map(math.isfinite, values)):
        return math.nan  # statistics would raise
    return statistics.stdev(values) / math.sqrt(len(values))


def upper_bound(differences: Sequence[float]) -> float:
    """What the true mean of these differences stays below, with a confidence of 95 %: one-sided, by Student's t."""
    return statistics.fmean(differences) + t_quantile(CONFIDENCE, len(differences) - 1) * standard_error(differences)


def mean_curve(curves: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.fmean(values) for values in zip(*curves, strict=True)]


def smooth(curve: Sequence[float], over: int = SMOOTHED) -> list[float]:
    """The mean of each step and the few before it."""
    return [statistics.fmean(curve[max(0, i + 1 - over) : i + 1]) for i in range(len(curve))]


def steps_to(curve: Sequence[float], goal: float) -> int | None:
    """The first step, counted from 1, at which the curve is down at the goal; None if it never is."""
    return next((step for step, value in enumerate(curve, 1) if value <= goal), None)
