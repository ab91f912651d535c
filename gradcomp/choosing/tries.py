"""The tries: rounds in which all ranks take some steps by each way that looks fast."""

from __future__ import annotations

import math
import statistics
from collections.abc import Generator, Mapping, Sequence

from gradcomp.choosing import ways
from gradcomp.choosing.account import Account
from gradcomp.choosing.switch import Switch
from gradcomp.choosing.ways import Way

# Steps after a change that do not count: a new reducer makes its memory, and capacities follow counts some steps later.
SETTLING, SETTLING_KEPT = 1, 4
# Steps of a try that count, and rounds of tries, in which those that lag behind drop out.
# NEAR: the others are at most this much slower than the fastest.
COUNTED, ROUNDS, NEAR = 3, 3, 1.15
# The stock steps that a choice has cost after which the rounds end, and after which nothing more is tried: it is to end
# within 20.
ENOUGH, MOST = 10, 15
# The part of an exact step that a step of stock takes at least, if it sends as many bytes.
LEAST = 0.8

# Yields the number of steps until the next turn, and gets the seconds of each of them.
Steps = Generator[int, list[float], None]


class Tries:
    """The tries of one choice.

    forecast: the seconds of a step by each way. exact: those of an exact step, or 0. medians: of the ways that were tried.
    """

    def __init__(self, switch: Switch, account: Account, forecast: Mapping[Way, float], exact: float):
        self._switch, self._account, self._forecast, self._exact = switch, account, forecast, exact
        self.medians: dict[Way, float] = {}
        self._seconds: dict[Way, list[float]] = {}
        self._cost = 0.0

    def take(self, candidates: Sequence[Way]) -> Steps:
        """Try some ways, those that look fast first. Stock is left out where it cannot be fast.

        Those that keep a residual come after the rounds: what waits is then sent once.
        """
        in_order = sorted(candidates, key=lambda way: self._forecast[way])
        keeping, left = [way for way in in_order if way.keeps], [way for way in in_order if not way.keeps]
        for _ in range(ROUNDS):
            for way in left:
                if self._cost <= ENOUGH and self._least(way) < NEAR * min(self.medians.values(), default=math.inf):
                    yield from self._try(way, SETTLING, COUNTED)
            fastest = min([*self.medians.values(), *(self._forecast[way] for way in keeping)], default=math.inf)
            left = [way for way in left if self.medians.get(way, math.inf) < NEAR * fastest]
        for way in keeping:
            if self._cost <= MOST:
                yield from self._try(way, SETTLING_KEPT, ROUNDS * COUNTED)

    def _try(self, way: Way, settling: int, counted: int) -> Steps:
        """Take some steps by a way, unless it does not suit the training."""
        if not (yield from self._switch.to(way)):
            return
        seconds = yield settling + counted
        own = self._seconds.get(way, []) + seconds[-counted:]
        fastest = min([statistics.median(own), *self.medians.values()])
        cost = self._account.cost(fastest, self.medians.get(ways.STOCK, self._account.usual))
        *self._seconds[way], self._cost = self._switch.means([*own, cost])
        self.medians[way] = statistics.median(self._seconds[way])

    def _least(self, way: Way) -> float:
        """Return the least time that a step can take: one of stock, as much of an exact one as it sends of the bytes."""
        return 0.0 if way.stock is None else LEAST * self._exact * way.stock.itemsize / 4
