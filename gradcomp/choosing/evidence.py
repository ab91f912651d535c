"""The evidence of several choices on the same link: what a way's steps take, over those of a way that users compare with."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping

from gradcomp.choosing.ways import Way

# The choices that count. What has changed little by little is not hidden by older ones.
CHOICES = 3


class Evidence:
    """What the last choices since forget() have measured. A way that is only faster by chance is not so in all of them.

    unit: the way that users compare with. Seconds of one choice and of another differ with all that the machine does beside;
    their ratios within a choice do less.
    """

    def __init__(self, unit: Way):
        self._unit = unit
        self._ratios: dict[Way, deque[float]] = {}

    def forget(self) -> None:
        """Begin anew: the link or the net has changed."""
        self._ratios.clear()

    def joined(self, seconds: Mapping[Way, float]) -> dict[Way, float]:
        """Add what a choice has measured. Return the seconds of its ways, as the last choices together show them."""
        if self._unit not in seconds:
            return dict(seconds)
        unit = seconds[self._unit]
        for way, own in seconds.items():
            self._ratios.setdefault(way, deque(maxlen=CHOICES)).append(own / unit)
        return {way: unit * statistics.geometric_mean(self._ratios[way]) for way in seconds}
