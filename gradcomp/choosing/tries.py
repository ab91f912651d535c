"""The tries: rounds in which all ranks take some steps by each way that looks fast."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from gradcomp.choosing.account import Account
from gradcomp.choosing.switch import Course, Switch
from gradcomp.choosing.ways import Way

# Steps after a change that do not count: a new reducer makes its memory, and capacities follow counts some steps later.
SETTLING, SETTLING_KEPT = 1, 4
# Steps of a try that count, and rounds of tries, in which those that lag behind drop out.
# NEAR: the others are at most this much slower than the fastest.
COUNTED, ROUNDS, NEAR = 3, 3, 1.15
# The stock steps that a choice has cost after which the rounds end, and after which nothing more is tried: it is to end
# within 20. The present way and stock are tried in any case, since one of them is what users compare with.
ENOUGH, MOST = 10, 15


class Tries:
    """The tries of one choice.

    forecast: the seconds of a step by each way. least: those that a step takes at least, of ways where that is known.
    unit: the way whose steps the cost counts. medians: of the ways that were tried.
    """

    def __init__(self, switch: Switch, account: Account, forecast: Mapping[Way, float], least: Mapping[Way, float], unit: Way):
        self._switch, self._account, self._forecast, self._least, self._unit = switch, account, forecast, least, unit
        self.medians: dict[Way, float] = {}
        self._seconds: dict[Way, list[float]] = {}
        self._cost = self._change = 0.0  # seconds: of the choice until now, and of the dearest change of way in it

    def take(self, candidates: Sequence[Way], present: Way) -> Course[None]:
        """Try some ways: the one until now, then by forecast. Those of stock are left out where they cannot be fast.

        Those that keep a residual come after the rounds: what waits is then sent once.
        """
        self._shared([], self._account.mark)
        in_order = sorted(candidates, key=lambda way: (way != present, self._forecast[way]))
        keeping, left = [way for way in in_order if way.keeps], [way for way in in_order if not way.keeps]
        for done in range(ROUNDS):
            for way in left:
                owed = done == 0 and (way == present or way.stock is not None)
                affordable = owed or self._cost_with(way, SETTLING + COUNTED) <= ENOUGH
                if affordable and self._least.get(way, 0.0) < NEAR * min(self.medians.values(), default=math.inf):
                    yield from self._try(way, SETTLING, COUNTED)
            fastest = min([*self.medians.values(), *(self._forecast[way] for way in keeping)], default=math.inf)
            left = [way for way in left if self.medians.get(way, math.inf) < NEAR * fastest]
        steps = ROUNDS * COUNTED
        for way in keeping:
            if way == present or self._cost_with(way, SETTLING_KEPT + steps) <= MOST:
                yield from self._try(way, SETTLING_KEPT, steps)

    def _try(self, way: Way, settling: int, counted: int) -> Course[None]:
        """Take some steps by a way, unless it does not suit the training."""
        own: list[float] = []
        mark = self._account.mark
        if (yield from self._switch.to(way)):
            seconds = yield settling + counted
            own = self._seconds.get(way, []) + seconds[-counted:]
        own, alone = self._shared(own, mark)
        if own:
            self._seconds[way], self.medians[way] = own, statistics.median(own)
            steps = (settling + counted) * (self.medians[way] - self._fastest)
            self._change = max(self._change, alone - steps)

    def _shared(self, own: Sequence[float], mark: tuple[float, int]) -> tuple[list[float], float]:
        """Note the seconds that the choice has cost until now.

        Return the means over the ranks of some steps' seconds, and of what the choice has cost since a mark.
        """
        fastest = min(statistics.median(own), self._fastest) if own else self._fastest
        costs = self._account.cost(fastest), self._account.cost(fastest, mark)
        *shared, self._cost, since = self._switch.means([*own, *costs])
        return shared, since

    @property
    def _fastest(self) -> float:
        return min(self.medians.values(), default=self._account.usual)

    @property
    def _unit_seconds(self) -> float:
        return self.medians.get(self._unit, self._account.usual)

    def _cost_with(self, way: Way, steps: int) -> float:
        """Return what the choice is expected to have cost after a change and so many steps, in steps of the unit."""
        slower = max(0.0, self.medians.get(way, self._forecast[way]) - self._fastest)
        return (self._cost + self._change + steps * slower) / self._unit_seconds
