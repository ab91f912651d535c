"""The chooser: its course over a training, in turns that all ranks take before the same steps."""

from __future__ import annotations

import copy
import itertools
import logging
import math
import statistics
import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch

from gradcomp.auto import Auto
from gradcomp.choosing import links, ways
from gradcomp.choosing.decision import Decision, best_of, shortlist
from gradcomp.choosing.forecast import Forecast
from gradcomp.choosing.switch import Switch
from gradcomp.choosing.ways import Way
from gradcomp.engine.sessions.session import Session
from gradcomp.engine.steps.step_clock import Seconds
from gradcomp.prediction import workload
from gradcomp.prediction.timeline import Work

log = logging.getLogger("gradcomp")

# A course yields the number of steps until its next turn, and gets the seconds that each of them took.
Course = Generator[int, list[float], None]

# Steps after a change that do not count: a new reducer makes its memory, and capacities follow counts some steps later.
SETTLING, SETTLING_KEPT = 1, 4
# Steps of a try that count, and rounds of tries, in which those that lag behind drop out.
# NEAR: the others are at most this much slower than the fastest.
COUNTED, ROUNDS, NEAR = 3, 3, 1.15
# The part of the steps' time that looking at them may take, and the steps between two looks, at least and at most.
LOOKING, NEXT_LOOK = 0.005, (10, 200)
# A step time that differs by this factor, or a link's by the other one, at so many looks in a row, is a change.
STEP_CHANGED, LINK_CHANGED, LOOKS = 1.25, 2.0, 2


class Chooser:
    """The turns of one rank under auto.

    session: outlives the chooser, which must not keep it alive. stock: the types in which its door can exchange past it.
    """

    def __init__(self, session: Session, auto: Auto, stock: Sequence[torch.dtype]):
        self._session, self._auto, self._stock = session, auto, stock
        self._switch = Switch(session)
        self._forecast: Forecast | None = None
        self._work: Work | None = None
        self._times: list[float] = []
        self._ended = time.perf_counter()
        self.decision: Decision | None = None
        self._looks = LOOKS
        self._course = self._run()
        self._left = next(self._course)

    @property
    def due(self) -> bool:
        """True if a turn comes before the next exchange."""
        return self._left <= 0

    def take(self) -> None:
        """Take the turn."""
        times, self._times = self._times, []
        self._left = self._course.send(times)

    def note_step(self) -> None:
        """Note a finished step."""
        now = time.perf_counter()
        self._times.append(now - self._ended)
        self._ended, self._left = now, self._left - 1

    def begin_anew(self, spec: str) -> None:
        """Begin anew after the next step: a state was loaded on all ranks, of a session whose compressor had this spec."""
        self._switch.note_loaded(Way(spec))
        self._times, self.decision = [], None
        self._course = self._run()
        self._left = next(self._course)

    def report(self) -> dict[str, Any]:
        """Return what was chosen, and why."""
        known = {"loss": self._auto.loss, "way": str(self._switch.way)}
        if self.decision is None:
            return {**known, "reason": "the first steps are measured"}
        return {**known, **self.decision.report(), "changes": self._switch.changes}

    def _run(self) -> Course:
        yield 1 + SETTLING  # the network may not be initialised yet
        if self._session.network.world.size == 1:
            yield from self._switch.to(ways.STOCK)
            yield from itertools.repeat(NEXT_LOOK[1])
        yield from self._measure_work()
        while True:
            yield from self._choose()
            yield from self._watch()

    def _measure_work(self) -> Course:
        """Learn from dense steps what forward, backward and the optimizer take."""
        if self._switch.way != ways.FIRST:
            yield from self._switch.to(ways.FIRST)
            yield 1 + SETTLING
        before = copy.copy(self._session.reducer.clock.seconds)
        yield COUNTED
        own = _less(self._session.reducer.clock.seconds, before).by_step()
        computing = own["total"] - own["exposed"] - own["backward_encoding"]
        backward = own["backward"] - own["backward_encoding"]
        computing, backward = self._switch.means([computing, backward])
        shapes: workload.Shapes = {name: (layer.size,) for name, layer in self._session.parameters.layers.items()}
        self._work = workload.given(shapes, max(0.0, computing - backward), backward, 0.0)

    def _choose(self) -> Course:
        """Measure links and kernels, try what looks fast, and go on with the fastest."""
        began, steps, spent = time.perf_counter(), 0, 0.0
        session, present = self._session, self._switch.way
        network, layers = session.network, session.parameters.layers
        several = network.world.hosts is not None and len({*network.world.hosts}) < network.world.size
        every = ways.ways(self._auto.loss, self._stock, several, session.training.is_told)
        if self._forecast is None:
            self._forecast = Forecast(layers, session.options.bucket_mb, network.world)
        entries = sum(layer.size for layer in layers.values())
        device = next(iter(layers.values())).device
        times = self._switch.mean_of(links.measure(network, device, entries))
        assert self._work is not None
        by_group = [ways.FIRST, *(way for way in every if way.stock is None and not way.keeps)]
        chosen = self._switch.of_first(self._forecast.by_group(by_group, self._work, times))
        if (mixed := self._forecast.mixed([by_group[i] for i in chosen])) is not None:
            every.insert(every.index(max((by_group[i] for i in chosen), key=by_group.index)), mixed)
        own = [self._forecast.seconds(way, self._work, times) for way in every]
        forecast = dict(zip(every, self._switch.means(own), strict=True))
        measuring = time.perf_counter() - began
        tried: dict[Way, list[float]] = {}
        candidates = shortlist(every, forecast, present)
        for round_ in range(ROUNDS):
            for way in [way for way in candidates if way.keeps <= (round_ == ROUNDS - 1)]:
                if not (yield from self._switch.to(way)):
                    continue
                counted = COUNTED if not way.keeps else ROUNDS * COUNTED
                settling = SETTLING_KEPT if way.keeps else SETTLING
                seconds = yield settling + counted
                spent, steps = spent + sum(seconds[1:]), steps + len(seconds[1:])
                tried.setdefault(way, []).extend(self._switch.means(seconds[-counted:]))
            fastest = min([*map(statistics.median, tried.values()), *(forecast[way] for way in candidates if way.keeps)])
            candidates = [way for way in candidates if way.keeps or _median(tried, way) < NEAR * fastest]
        medians = {way: statistics.median(seconds) for way, seconds in tried.items()}
        best, reason = best_of(every, medians, present if present in medians else None)
        cost = (measuring + spent - steps * medians[best]) / medians.get(ways.STOCK, medians[best])
        step = session.reducer.steps_done
        self.decision = Decision(reason, step, medians, forecast, times, cost)
        if network.world.rank == 0:
            log.info("gradcomp: auto goes on with %s after step %d: %s", best, step, reason)
        yield from self._switch.to(best)
        self._looks = self._looks * 2 if best == present else LOOKS

    def _watch(self) -> Course:
        """Look at steps and links now and then, until they have changed."""
        session = self._session
        device = next(iter(session.parameters.layers.values())).device
        yield SETTLING_KEPT
        interval, usual, odd = NEXT_LOOK[0], None, 0
        while odd < self._looks:
            seconds = yield interval
            began = time.perf_counter()
            step = statistics.median(seconds)
            (own,) = self._switch.means([step])
            step, link, took = self._switch.means([own, links.probe(session.network, device), time.perf_counter() - began])
            interval = int(min(max(NEXT_LOOK[0], took / (LOOKING * step)), NEXT_LOOK[1]))
            usual = usual or (step, link)
            changed = _apart(step, usual[0]) > STEP_CHANGED or _apart(link, usual[1]) > LINK_CHANGED
            odd = odd + 1 if changed else 0


def _less(seconds: Seconds, before: Seconds) -> Seconds:
    return Seconds(**{name: value - getattr(before, name) for name, value in vars(seconds).items()})


def _median(tried: Mapping[Way, Sequence[float]], way: Way) -> float:
    return statistics.median(tried[way]) if way in tried else math.inf


def _apart(one: float, other: float) -> float:
    return max(one, other) / max(1e-9, min(one, other))
