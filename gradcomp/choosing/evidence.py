"""The evidence of several choices on the same link: what a way's steps take, over those of a way that users compare with."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from gradcomp.choosing.ways import Way


class Evidence:
    """What the choices since forget() have measured. A way that is only faster by chance is not so in all of them.

    unit: the way that users compare with. Seconds of one choice and of another differ with all that the machine does beside;
    their ratios within a choice do less.
    """

    def __init__(self, unit: Way):
        self._unit = unit
        self._ratios: dict[Way, list[float]] = {}

    def forget(self) -> None:
        """Begin anew: the link or the net has changed."""
        self._ratios.clear()

    def joined(self, seconds: Mapping[Way, float]) -> dict[Way, float]:
        """Add what a choice has measured. Return the seconds of its ways, as all choices together show them."""
        if self._unit not in seconds:
            return dict(seconds)
        unit = seconds[self._unit]
        for way, own in seconds.items():
            self._ratios.setdefault(way, []).append(own / unit)
        return {way: unit * statistics.geometric_mean(self._ratios[way]) for way in seconds}
