"""The decision: which ways are worth a try, and which one is taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gradcomp.choosing.ways import Way
from gradcomp.prediction.link import Measured
from gradcomp.prediction.result import WORTH

# A way is tried if its step is predicted to be at most this much longer than the shortest; and so many are tried.
WORTH_A_TRY, TRIED = 1.3, 5
# A gentler way is taken if a step gets no longer than this.
NO_LONGER = 1.01


class Decision(NamedTuple):
    """What was decided after a step, and from what.

    tried, forecast: the seconds of a step by each way. exact: those of the exact steps in which it began.
    cost: the seconds of measuring, changes and tries of the last choice whose way's first steps are over, beyond as many steps
    of that way; None before the first. unit: the seconds of a step of stock torch or Horovod then, or of an exact one.
    """

    reason: str
    step: int
    tried: Mapping[Way, float]
    forecast: Mapping[Way, float]
    links: Measured
    exact: float
    cost: float | None = None
    unit: float = 0.0

    def report(self) -> dict[str, Any]:
        """Return it as figures."""
        return {
            "reason": self.reason,
            "after_step": self.step,
            "seconds": {str(way): seconds for way, seconds in self.tried.items()},
            "forecast": {str(way): seconds for way, seconds in self.forecast.items()},
            "exact": self.exact,
            "links": dict(self.links.lines),
            "cost_seconds": self.cost,
            "cost_in_steps": self.cost / self.unit if self.cost and self.unit else self.cost,
        }


def shortlist(every: Sequence[Way], forecast: Mapping[Way, float], present: Way) -> list[Way]:
    """Choose the ways that are worth a try: those of stock, the present one, and the fastest by forecast."""
    ordered = sorted(every, key=lambda way: forecast[way])
    most = WORTH_A_TRY * forecast[ordered[0]]
    fastest = [way for way in ordered[:TRIED] if forecast[way] <= most]
    return [way for way in every if way.stock is not None or way == present or way in fastest]


def best_of(every: Sequence[Way], seconds: Mapping[Way, float], present: Way) -> tuple[Way, str]:
    """Return the best of the ways that were tried, and why.

    every: from the way that loses least. One that loses more than the best so far must be WORTH times as fast, and one that
    loses less at most NO_LONGER times as slow. What lies between keeps a way from coming and going.
    """
    tried = [way for way in every if way in seconds]
    if not tried:
        return present, "no other way suits the training now"
    best = present if present in tried else tried[0]
    for way in tried:
        gentler = tried.index(way) < tried.index(best)
        if seconds[way] < seconds[best] * (NO_LONGER if gentler else 1 / WORTH):
            best = way
    others = [f"{way} {_ms(seconds[way])}" for way in sorted(tried, key=lambda way: seconds[way]) if way != best]
    beside = f", beside {', '.join(others)}" if others else ""
    return best, f"a step takes {_ms(seconds[best])}{beside}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
