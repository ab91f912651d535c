"""The chooser: its course over a training, in turns that all ranks take before the same steps."""

from __future__ import annotations

import logging
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from gradcomp.auto import LOSSES, Auto
from gradcomp.choosing import links, ways
from gradcomp.choosing.account import Account
from gradcomp.choosing.decision import Decision, best_of, shortlist
from gradcomp.choosing.evidence import Evidence
from gradcomp.choosing.forecast import Forecast
from gradcomp.choosing.foresight import foresee
from gradcomp.choosing.looks import LOOKS, NEXT_LOOK, Looks
from gradcomp.choosing.switch import Course, Switch
from gradcomp.choosing.tries import COUNTED, SETTLING, SETTLING_KEPT, Tries
from gradcomp.choosing.ways import Way
from gradcomp.engine.sessions.session import Session
from gradcomp.engine.steps.step_clock import Seconds
from gradcomp.prediction import workload
from gradcomp.prediction.link import Measured
from gradcomp.prediction.timeline import Work
from gradcomp.prediction.trial import device_wait
from gradcomp.spec import make

log = logging.getLogger("gradcomp")

# Kernels are timed until this many exact steps' time has passed, in each choice. Ways that are left come in the next one. Those
# that an earlier choice has timed are timed again for so long, since something may have slowed them down then.
TIMING, TIMING_AGAIN = 6, 2
# The steps after which the choice is made again in any case: something may have slowed down a try. Twice as many after a choice
# that came out as before; and twice as many odd looks are then a change, up to MOST_LOOKS.
AGAIN, MOST_LOOKS = 300, 8
# The part of the steps' time that one choice after the other because of step times may take: the steps of some trainings always
# vary.
VARYING = 0.02
# Why loss=high offers no more than loss=low.
UNKNOWN = (
    "they need an optimizer that is given (optimizer=, or hvd.DistributedOptimizer) and whose momentum can be taken over: SGD, "
    "Adam or AdamW, with one momentum for all parameters"
)
# The part of an exact step that a step of stock takes at least, if it sends as many bytes.
LEAST = 0.8


class Chooser:
    """The turns of one rank under auto.

    session: outlives the chooser, which must not keep it alive. stock: the types in which its door can exchange past it.
    """

    def __init__(self, session: Session, auto: Auto, stock: Sequence[torch.dtype]):
        self._session, self._auto, self._stock = session, auto, stock
        self._unit = ways.STOCK if ways.STOCK.stock in stock else ways.FIRST  # what users have without gradcomp
        self._switch, self._account = Switch(session), Account()
        layers = session.parameters.layers.values()
        self._device = next((layer.device for layer in layers), torch.device("cpu"))
        self._wait = device_wait(self._device)
        self._entries = sum(layer.size for layer in layers)
        self._clock, self._clocks = Seconds(), deque[Seconds](maxlen=COUNTED)
        self._begin()

    def _begin(self) -> None:
        self._forecast: Forecast | None = None
        self._work: Work | None = None
        self._exact = 0.0  # seconds of an exact step
        self._times: list[float] = []
        self._ended, self._timed = time.perf_counter(), True
        self.decision: Decision | None = None
        self._choices, self._looks, self._again, self._varies = 0, LOOKS, AGAIN, False
        self._evidence = Evidence(self._unit)
        self._course = self._run()
        self._left = next(self._course)

    @property
    def due(self) -> bool:
        """True if a turn comes before the next exchange."""
        return self._left <= 0

    def take(self) -> None:
        """Take the turn."""
        times, self._times = self._times, []
        self._account.begin_turn()
        self._left = self._course.send(times)
        self._account.end_turn()

    def note_step(self) -> None:
        """Note a finished step."""
        if self._timed:
            self._wait()
        now = time.perf_counter()
        self._times.append(now - self._ended)
        self._account.note_step(now - self._ended)
        clock, before = replace(self._session.reducer.clock.seconds), self._clock
        self._clocks.append(clock.less(before) if clock.steps == before.steps + 1 else clock)
        self._clock = clock
        self._ended, self._left = now, self._left - 1

    def begin_anew(self, spec: str, same: bool) -> None:
        """Begin anew in a meeting: the ranks may be others, or go on from another state.

        spec: with which all ranks go on. same: the session has its compressor already.
        """
        if not same:
            self._session.follow(make(spec))
        self._switch.begin_anew(Way(spec))
        self._begin()

    def report(self) -> dict[str, Any]:
        """Return what was chosen, and why."""
        known = {"loss": self._auto.loss, "way": str(self._switch.way), "changes": self._switch.changes}
        refused = {str(way): why for way, why in self._switch.refused.items()}
        if self._auto.loss == LOSSES[-1] and not self._session.training.bears_waiting:
            refused["all that keep a residual"] = UNKNOWN
        known |= {"choices": self._choices, "refused": refused}
        if self.decision is None:
            return {**known, "reason": "the first steps are measured"}
        return {**known, **self.decision.report()}

    def _run(self) -> Course[None]:
        yield 1 + SETTLING  # the network may not be initialised yet
        if self._session.network.world.size == 1:
            yield from self._switch.to(self._unit)
            self._timed, self._choices = False, 1
            self.decision = Decision(
                "one rank exchanges nothing", self._session.reducer.steps_done, {}, {}, Measured({}), 0.0, 0.0
            )
            while True:
                yield NEXT_LOOK[1]
        while True:
            self._account.open()
            self._timed, exact = True, 0.0
            present = self._switch.way  # measuring the work needs another one
            if self._work is None:
                yield from self._measure_work()
                exact = self._exact
            yield from self._choose(exact, present)
            self._timed = False
            yield from self._watch()

    def _measure_work(self) -> Course[None]:
        """Learn from exact steps what forward, backward and the optimizer take.

        Where ways with error feedback may follow, these steps take the momentum over as they do: a training that this does not
        suit is to hear of it now, and not after hours, when a link has become slower.
        """
        takes_over = self._auto.loss == LOSSES[-1] and self._session.training.bears_waiting
        if (yield from self._switch.to(ways.SENDS_ALL if takes_over else ways.FIRST)):
            yield SETTLING
        seconds = yield 1 + COUNTED  # the first one's gradients may have been held
        parts = ("exposed", "backward", "backward_encoding")
        exposed, backward, encoding = (statistics.median(getattr(each, part) for each in self._clocks) for part in parts)
        total = statistics.median(seconds[-COUNTED:])
        self._exact, computing, backward = self._switch.means([total, total - exposed - encoding, backward - encoding])
        shapes: workload.Shapes = {name: (layer.size,) for name, layer in self._session.parameters.layers.items()}
        self._work = workload.given(shapes, max(0.0, computing - backward), backward, 0.0)

    def _choose(self, exact: float, present: Way) -> Course[None]:
        """Measure links and kernels, try what looks fast, and go on with the fastest.

        exact: seconds of an exact step; 0 if they were measured long ago, perhaps on another link. present: the way until now.
        """
        session = self._session
        stock = self._stock if session.options.observer is None else self._stock[:1]  # what is watched, the session exchanges
        every = ways.ways(self._auto.loss, stock, session.network.world.shares_hosts, session.training.bears_waiting)
        times = self._switch.mean_of(links.measure(session.network, self._device, links.long_of(self._entries)))
        every, forecast = self._foresee(every, times, present)
        self._account.usual = max(exact, forecast[self._unit])
        least = {way: LEAST * exact * self._part_of(way.stock) for way in every if way.stock is not None}
        tries = Tries(self._switch, self._account, forecast, least, self._unit)
        self._switch.open()
        yield from tries.take(shortlist(every, forecast, present), present)
        seconds = self._evidence.joined(tries.medians)
        best, reason = best_of(every, seconds, present)
        if not (yield from self._switch.to(best)):
            best, reason = best_of(every, {way: seconds[way] for way in seconds if way.keeps}, self._switch.way)
            yield from self._switch.to(best)
            reason = f"{reason}; entries wait that cannot be sent, perhaps of frozen layers, and only some ways keep them"
        cost = (None, 0.0) if self.decision is None else (self.decision.cost, self.decision.unit)
        step = session.reducer.steps_done
        self.decision = Decision(reason, step, seconds, forecast, times, self._exact, *cost)
        if session.network.world.rank == 0:
            log.info("gradcomp: auto goes on with %s after step %d: %s", best, step, reason)
        rarer = min(2 * self._looks, MOST_LOOKS), 2 * self._again
        self._looks, self._again = rarer if best == present else (LOOKS, AGAIN)
        self._choices += 1

    def _part_of(self, stock: torch.dtype) -> float:
        """Return the part of an exact exchange's bytes that stock sends."""
        return self._session.parameters.bytes_in(stock) / (torch.float32.itemsize * max(1, self._entries))

    def _foresee(self, every: list[Way], times: Measured, present: Way) -> tuple[list[Way], dict[Way, float]]:
        """Predict the step of each way, and of a mixed one. Return them all, and their steps' seconds."""
        assert self._work is not None
        session = self._session
        if self._forecast is None:
            types = {slot.name: slot.parameter.dtype for slot in session.parameters.slots}
            options = session.options.bucket_mb, session.network.world, types
            self._forecast = Forecast(session.parameters.layers, *options)
        limits = TIMING * self._exact, TIMING_AGAIN * self._exact
        return foresee(self._switch, self._forecast, every, present, self._work, times, *limits)

    def _watch(self) -> Course[None]:
        """Look at steps and links now and then, until they have changed, or for long."""
        session = self._session
        yield SETTLING_KEPT
        cost, began_at = self._note_cost(), session.reducer.steps_done
        ends, patient_until = began_at + self._again, began_at + (cost / VARYING if self._varies else 0)
        probe = partial(links.probe, session.network, self._device, self._entries)
        looks = Looks(probe, self._switch.means, self._looks, patient_until)
        while not looks.changed and session.reducer.steps_done < ends:
            seconds = yield max(1, min(looks.interval, ends - session.reducer.steps_done))
            looks.take(seconds, session.reducer.steps_done)
        self._varies = looks.changed and not looks.link_changed
        if self._varies:
            self._work = None  # the net computes more or less than before
        if looks.changed:
            self._evidence.forget()

    def _note_cost(self) -> float:
        """Note what the choice has cost, now that its way's first steps are over. Return it in steps of the chosen way."""
        assert self.decision is not None
        if not (tried := self.decision.tried):
            return 0.0
        usual = tried.get(self._switch.way, min(tried.values()))
        (cost,) = self._switch.means([self._account.cost(usual)])
        self.decision = self.decision._replace(cost=cost, unit=tried.get(self._unit, self._account.usual))
        return cost / usual
