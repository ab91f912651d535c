"""A session: one model's exchanges on one rank, behind a door, from its first step to its last."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from gradcomp import _version
from gradcomp.core.compressor import Compressor
from gradcomp.engine import state
from gradcomp.engine.announcement import Announcement
from gradcomp.engine.gradients import GradientExchange
from gradcomp.engine.meeting import Flow, Membership, run
from gradcomp.engine.phases import Door, Phases
from gradcomp.engine.reducer import Options, Reducer
from gradcomp.engine.resume import Resume
from gradcomp.engine.slots import Slot, Slots
from gradcomp.engine.updates.step_exchange import StepExchange
from gradcomp.engine.updates.steps import ignore, listen
from gradcomp.engine.updates.to_gradients import average_states
from gradcomp.networks import Connection

log = logging.getLogger("gradcomp")


class Session:
    """One model's exchanges on one rank. reducer: of the present compressor. turns: auto's Chooser, or None.

    gradients: their exchange within backward passes. updates: that around the steps of the user's optimizers, where the door
    has any. sums: updates are sums over the ranks, not means.
    resume: the ways to another spec, state or commit.
    """

    def __init__(self, compressor: Compressor, slots: Slots, network: Connection, options: Options, door: Door):
        self.slots, self.network, self.options, self.door = slots, network, options, door
        self.turns, self._observer = None, None  # type: Any, Any  # the second is telemetry's
        self.membership, self.phases = Membership(network), Phases(self)
        self.sums = False
        self.announcement = Announcement(door, network)
        self.resume = Resume(self)
        self.gradients, self.updates = GradientExchange(self), StepExchange(self)
        self.install(self.make_reducer(compressor), compressor)

    def make_reducer(self, compressor: Compressor, parts: Mapping[str, Hashable] | None = None) -> Reducer:
        on_updates = self.door.acts_on_updates(compressor)
        if compressor.traits.rates == "needed" and not (on_updates or self.door.has_rates):
            remedy = "" if self.door.has_optimizers else "pass optimizer=, or "
            raise ValueError(f"{compressor} needs the learning rates: {remedy}let it keep a residual, without feedback=false")
        parts = (parts or self.updates.optimizers.parts) if on_updates else None
        slots = {} if self.door.exchanges_gradients and not on_updates else {slot.name: slot for slot in self.slots.slots}
        reducer = Reducer(compressor, slots, self.network, self.options, parts, on_updates)
        reducer.entries = self.slots.entries
        reducer.watch(self._observer)
        return reducer

    def install(self, reducer: Reducer, compressor: Compressor) -> None:
        """Continue with a reducer."""
        self.reducer, self.compressor = reducer, compressor
        self.gradients.let_stock_exchange(None)
        self.updates.given_momentum = reducer.given_momentum
        self.updates.forget()
        self.updates.optimizers.turn(to_updates=reducer.on_updates)
        self.attend()

    def attend(self) -> None:
        """Listen to the steps of optimizers where updates are or were exchanged, or auto may choose that; otherwise to none."""
        optimizers = self.updates.optimizers
        listens = self.reducer.on_updates or self.turns is not None or optimizers.averaged is not None
        (listen if listens else ignore)(self)

    def restore(self, load: Callable[[], None], reducer: Reducer, compressor: Compressor) -> None:
        """Discard the step under way, and continue with a reducer that load() has filled. Steps are allowed again."""
        self.recover()
        self.install(reducer, compressor)
        self.updates.optimizers.note_change(is_loaded=True)
        load()

    @property
    def has_met(self) -> bool:
        """True if the ranks have met since the network was last initialised."""
        return self.membership.met_in is self.network.generation

    def failed(self, error: BaseException) -> BaseException:
        """Note that this rank's step failed, and return the error. Further steps are refused until the ranks meet again."""
        self.membership.invalidate()
        self._discard_step()
        self.phases.reason = f"{type(error).__name__}: {error}"
        self.phases.note("a failure")
        return error

    def recover(self) -> None:
        """Discard the step under way, and allow steps again after one that failed."""
        self._discard_step()
        self.phases.note("a new start")

    def _discard_step(self) -> None:
        """Discard the step under way. The entries that it has taken from the residual are lost."""
        self.reducer.abort()
        self.updates.discard()
        self.gradients.discard()
        self.door.discard()

    @property
    def spec(self) -> str:
        return str(self.compressor)

    def slot(self, parameter: Tensor) -> Slot:
        """Find the slot of a parameter. Refuse an unknown parameter."""
        if (slot := self.slots.slot(parameter)) is None:
            raise self.failed(ValueError(self.door.unknown.format(shape=tuple(parameter.shape))))
        return slot

    @contextmanager
    def noting_failure(self) -> Iterator[None]:
        """Note a failure, so that further steps are refused."""
        try:
            yield
        except BaseException as error:
            self.failed(error)
            raise

    def take_turn(self) -> None:
        """Let auto choose, if it is due."""
        if self.turns is not None and self.turns.due:
            self.meet()
            if self.turns.due:  # the meeting may have restarted them
                with self.noting_failure():
                    self.turns.take()

    def meet(self, leader: int | None = None) -> None:
        """Wait for the other ranks, and check that all agree. Do nothing if they have met since the network was initialised.

        leader: the rank whose state the others adopt where they differ, if need be by going back to a commit; by default the
        first with the most steps.
        """
        if not self.has_met:
            run(self.meeting(leader))

    def meeting(self, leader: int | None = None, follows: bool = True) -> Flow[None]:
        """Meet in lock-step with other ranks. See meet(). follows: under auto, adopt the leader's compressor.

        If any two ranks of the whole mesh differ, all raise an error: ranks of other axes wait for one.
        """
        if not self.membership.axes:
            yield from self._meet(leader, follows)
            return
        error: ValueError | None = None
        try:
            yield from self._meet(leader, follows)
        except ValueError as differ:
            error = differ
        for axis in self.membership.axes:
            differ_in = str(error or "agree").rpartition("equal on all ranks: ")[2]  # as much as a record has room for
            try:
                terms = {name: text for name, text in self._terms().items() if name not in self.door.agreed}
                yield from axis.compare(terms | {"replicas": differ_in}, 0, None)
                yield from axis.learn_hosts()
            except ValueError as differ:
                error = error or differ
        if error is not None:
            self.membership.invalidate()
            raise error

    def _meet(self, leader: int | None, follows: bool) -> Flow[None]:
        membership, steps = self.membership, self.reducer.steps_done
        apart = self.updates.optimizers.averaged is not None
        of_leader, joins = yield from membership.compare(self._terms(), steps, leader, apart)
        if joins:
            state.scale_state(self.reducer, 0.0)
        elif of_leader != steps and not (leader is not None and self.resume.go_back(of_leader)) and steps:
            text = "gradcomp: the residual of rank %d is of step %d, but all ranks continue after step %d"
            log.warning(text, self.network.world.number(self.network.world.rank), steps, of_leader)
        if follows and self.turns is not None:  # ranks that are new to a training have another compressor
            self.gradients.let_stock_exchange(None)
            compressor = self.turns.restart((yield from membership.of_leader(self.spec)))
            if str(compressor) != self.spec:
                self.install(state.carry(self.reducer, self.make_reducer(compressor)), compressor)
        if membership.grows and self.reducer.on_updates and of_leader:  # a rank that joins has not seen the optimizers step
            parts = json.loads((yield from membership.of_leader(json.dumps(self.reducer.part_of_layer))))
            self.updates.optimizers.adopt(parts)
            if parts != self.reducer.part_of_layer:
                self.reducer = state.regroup(self.reducer, self.make_reducer(self.compressor))
        yield from membership.settle(self.reducer, self.sums)
        optimizers = self.updates.optimizers
        if membership.were_apart and not self.reducer.on_updates:
            optimizers.turn(to_updates=False, were_apart=True)
            self.attend()
        if membership.unlike and not self.reducer.on_updates:
            yield from average_states(optimizers, self.network)
        membership.unlike = False
        self.updates.since_meeting = 0

    def average_optimizers(self) -> None:
        """Meet, and average what the ranks' optimizers keep: that of one which is about to step may differ."""
        self.membership.unlike = True
        with self.noting_failure():
            run(self.meeting(follows=False))

    def _terms(self) -> dict[str, str]:
        """Describe all that must be equal on all ranks."""
        own = {"gradcomp's version": _version.VERSION, "spec": self.spec if self.turns is None else str(self.turns)}
        choice = {"telemetry": str(self._observer or "off"), "auto": str(self.turns or "off")}
        return own | self.options.terms | choice | self.slots.terms() | self.door.agreed

    def watch(self, observer: Any) -> None:
        """Tell telemetry's observer of all steps. The ranks meet again: their observers' joint acts must be equal."""
        self.phases.note("watch()")
        before = self._observer
        self.observe(observer)
        if self.has_met:
            self.membership.invalidate()
            try:
                self.meet()
            except BaseException:
                self.observe(before)
                raise

    def observe(self, observer: Any) -> None:
        """Tell an observer of all steps; None for no longer. See watch()."""
        self._observer = observer
        self.reducer.watch(observer)
