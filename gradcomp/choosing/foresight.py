"""The foresight of all ranks: the step of each way as they predict it together, and of one that mixes them by group."""

from __future__ import annotations

import time
from collections.abc import Sequence

from gradcomp.choosing import ways
from gradcomp.choosing.forecast import Forecast
from gradcomp.choosing.switch import Switch
from gradcomp.choosing.ways import Way
from gradcomp.prediction.link import Measured
from gradcomp.prediction.timeline import Work


def foresee(
    switch: Switch,
    forecast: Forecast,
    every: Sequence[Way],
    present: Way,
    work: Work,
    times: Measured,
    most: float,
    most_again: float,
) -> tuple[list[Way], dict[Way, float]]:
    """Predict the step of each way, and of a mixed one. Return them all, and their steps' seconds.

    every: from the way that loses least. present: the way until now. most: the seconds after which no more kernels are timed;
    stock and the present way are predicted in any case. most_again: those after which none are timed again.
    """
    seconds: dict[Way, float] = {}
    began, spent = time.perf_counter(), 0.0

    def predict(way: Way) -> None:
        nonlocal spent
        own = forecast.seconds(way, work, times)
        seconds[way], spent = switch.means([own, time.perf_counter() - began])

    in_order = dict.fromkeys([ways.FIRST, *sorted(every, key=lambda way: (way.stock is None, way != present))])
    known_before = [way for way in in_order if forecast.knows(way)]
    for way in in_order:
        if spent < most or way.stock is not None or way == present:
            predict(way)
    for way in known_before:
        if spent < most_again:
            forecast.time_again(way)
            predict(way)
    known = [way for way in every if way in seconds]

    def note(mixed: Way) -> None:
        known.insert(_place_of(mixed, known), mixed)
        (seconds[mixed],) = switch.means([forecast.seconds(mixed, work, times)])

    if present.is_mixed:
        note(present)
    by_group = [ways.FIRST, *(way for way in known if way.stock is None and not way.keeps)]
    chosen = switch.of_first(forecast.by_group(by_group, work, times))
    mixed = forecast.mixed([by_group[i] for i in chosen])
    if mixed is not None and mixed != present:
        note(mixed)
    return known, seconds


def _place_of(mixed: Way, known: Sequence[Way]) -> int:
    """Return the place of a mixed way among some that are sorted by what they lose: before that of its own that loses most."""
    return max((known.index(way) for way in map(Way, mixed.specs) if way in known), default=len(known))
