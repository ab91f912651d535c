"""A session: one model's exchanges on one rank, behind a door, from its first step to its last."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gradcomp import _version
from gradcomp.core.compressor import Compressor
from gradcomp.engine import state
from gradcomp.engine.announcement import Announcement, of_updates
from gradcomp.engine.meeting import Flow, Membership, run
from gradcomp.engine.phases import TRANSITIONS, Door, Phase
from gradcomp.engine.reducer import Options, Reducer
from gradcomp.engine.resume import Resume
from gradcomp.engine.slots import Slot, Slots
from gradcomp.engine.updates.step_exchange import StepExchange
from gradcomp.engine.updates.steps import ignore, listen
from gradcomp.networks import Connection

log = logging.getLogger("gradcomp")


class Session:
    """One model's exchanges on one rank. reducer: of the present compressor. turns: auto's Chooser, or None.

    updates: the exchange around the steps of the user's optimizers, where the door has any. sums: updates are sums over the
    ranks, not means. last_phase: the stored one; see phase. axes: of the mesh beside the network; their ranks
    meet, too. resume: the ways to another spec, state or commit.
    """

    def __init__(self, compressor: Compressor, slots: Slots, network: Connection, options: Options, door: Door):
        self.slots, self.network, self.options, self.door = slots, network, options, door
        self.turns, self._observer = None, None  # type: Any, Any  # the second is telemetry's
        self._by_name = {slot.name: slot for slot in slots.slots}
        self.membership = Membership(network)
        self.last_phase, self._since, self._reason = Phase.IDLE, None, ""  # type: Phase, object, str  # the last: of a failure
        self._held, self._stock = dict[str, Slot](), None  # type: Any, torch.dtype | None
        self.sums = False
        self.axes: list[Membership] = []
        self._announcement = Announcement(door, network)
        self.resume = Resume(self)
        self.updates = StepExchange(self)
        self.install(self.make_reducer(compressor), compressor)

    def make_reducer(self, compressor: Compressor) -> Reducer:
        on_updates = self.door.acts_on_updates(compressor)
        if compressor.traits.rates == "needed" and not (on_updates or self.door.has_rates):
            remedy = "" if self.door.has_optimizers else "pass optimizer=, or "
            raise ValueError(f"{compressor} needs the learning rates: {remedy}let it keep a residual, without feedback=false")
        parts = self.updates.optimizers.parts if on_updates else None
        slots = {} if self.door.exchanges_gradients and not on_updates else self._by_name
        reducer = Reducer(compressor, slots, self.network, self.options, parts, on_updates)
        reducer.entries = self.slots.entries
        reducer.watch(self._observer)
        return reducer

    def install(self, reducer: Reducer, compressor: Compressor) -> None:
        """Continue with a reducer."""
        self.reducer, self.compressor, self._stock = reducer, compressor, None
        self.given_momentum = reducer.given_momentum
        self.updates.forget()
        (listen if reducer.on_updates else ignore)(self.updates)  # an exchange of gradients looks at no optimizer

    def restore(self, load: Callable[[], None], reducer: Reducer, compressor: Compressor) -> None:
        """Discard the step under way, and continue with a reducer that load() has filled. Steps are allowed again."""
        self.recover()
        self.install(reducer, compressor)
        self.updates.optimizers.note_change(to_updates=False)
        load()

    @property
    def phase(self) -> Phase:
        """The present phase. One that is stored counts in the network's generation in which it began."""
        if self._since is self.network.generation:
            return self.last_phase
        return Phase.IDLE if self.has_met else Phase.UNMET

    def note(self, event: str, here: object = None) -> None:
        """Go on to the phase after an event. Raise an error if the present phase refuses it. here: the network's generation."""
        here, membership = here or self.network.generation, self.membership  # without calls: two events come in every step
        phase = self.last_phase if self._since is here else Phase.IDLE if membership.met_in is here else Phase.UNMET
        found = TRANSITIONS[event].get(phase, phase)
        if isinstance(found, str):
            remedy = self.door.after_failure if phase is Phase.FAILED else ""
            raise RuntimeError(found.format(event=event, reason=self._reason) + remedy)
        self.last_phase, self._since = found, here if found is Phase.EXCHANGING or found is Phase.FAILED else None

    @property
    def has_met(self) -> bool:
        """True if the ranks have met since the network was last initialised."""
        return self.membership.met_in is self.network.generation

    def failed(self, error: BaseException) -> BaseException:
        """Note that this rank's step failed, and return the error. Further steps are refused until the ranks meet again."""
        self.membership.part()
        self._discard_step()
        self._reason = f"{type(error).__name__}: {error}"
        self.note("a failure")
        return error

    def recover(self) -> None:
        """Discard the step under way, and allow steps again after one that failed."""
        self._discard_step()
        self.note("a new start")

    def _discard_step(self) -> None:
        """Discard the step under way. The entries that it has taken from the residual are lost."""
        self.reducer.abort()
        self.updates.discard()
        self._held.clear()
        self.door.discard()

    @property
    def spec(self) -> str:
        return str(self.compressor)

    def let_stock_exchange(self, stock: torch.dtype | None) -> None:
        """Let the stock framework exchange gradients that are not watched, in this type. None: the session does."""
        self._stock = stock

    @property
    def stock(self) -> torch.dtype | None:
        """The widest type in which the stock framework is to exchange gradients. None: the session does, or ranks must meet."""
        return self._stock if self._stock is not None and self._observer is None and self.has_met else None

    def slot(self, parameter: Tensor) -> Slot:
        """Find the slot of a parameter. Refuse an unknown parameter."""
        if (slot := self.slots.slot(parameter)) is None:
            raise self.failed(ValueError(self.door.unknown.format(shape=tuple(parameter.shape))))
        return slot

    def begin(self) -> None:
        """Begin a step, or go on with it."""
        if self._since is (here := self.network.generation):
            if self.last_phase is Phase.EXCHANGING:
                return
            self.note("a gradient", here)  # refuses it after a failure
        elif self._since is not None:  # the network was initialised anew in a step, or after one that failed
            self.recover()
        if self.turns is not None and not (self.door.holds or self.reducer.on_updates):
            self._take_turn()
        updates = self.updates
        updates.has_gradients = updates.has_unchecked_gradients = updates.has_seen_gradients = True
        if not self.reducer.on_updates:
            self.note("a gradient", here)
        if self._stock is not None and self.reducer.clock is not None:
            self.reducer.clock.note_gradient()

    def ready(self, slot: Slot) -> None:
        """Note that a parameter's gradient is complete. The last one of a bucket starts the bucket's exchange."""
        here = self.network.generation
        if self._since is not here or self.last_phase is not Phase.EXCHANGING:
            self.begin()
        has_met = self.membership.met_in is here
        if self.door.holds and (not has_met or (self.turns is not None and self.turns.due)):
            self._held[slot.name] = slot
        elif not self.reducer.on_updates:
            if not has_met:
                self.meet()
            self._hand_over(slot)

    def ready_all(self, slots: Sequence[Slot], grads: Sequence[Tensor]) -> None:
        """Note several complete gradients of a step that has begun."""
        if self.membership.met_in is not self.network.generation:
            self.meet()
        try:
            self.reducer.ready_all(slots, grads)
        except BaseException as error:
            self.failed(error)
            raise

    def _hand_over(self, slot: Slot) -> None:
        try:
            if self._stock is None or self.stock is None:
                self.slots.are_read = True
                self.reducer.ready_all((slot,), (slot.read(),))
            else:
                self.door.start_stock_allreduce(slot)
        except BaseException as error:
            self.failed(error)
            raise

    def finish(self, scale: float = 1.0) -> None:
        """Finish the step: the gradients are then scale times the mean update. Only the first call in a step acts."""
        if self._since is None:
            return
        if self.last_phase is Phase.FAILED:
            self.note("the end of a step")
        if self._held:
            self._release()
            if self._since is None:  # a turn has led to an exchange of updates
                return
        if self._stock is None or self.stock is None:
            try:
                self.reducer.finish(scale)
            except BaseException as error:
                self.failed(error)
                raise
        else:
            self.reducer.note_stock_step(self.slots.bytes_in(self._stock))
        self.note("the end of a step", self._since)
        if self.slots.are_read:
            self.slots.close()
        if self.turns is not None:
            self.turns.note_step()
        if self._announcement.is_due:
            self._announcement.say(self.spec, "exchanges gradients", self.turns)

    def _release(self) -> None:
        """Hand over the gradients that were held until the ranks have met."""
        self.meet()
        self._take_turn()
        held, self._held = self._held, {}
        if self.reducer.on_updates:
            self.note("the end of a step")
            return
        for slot in held.values():
            self._hand_over(slot)

    def _take_turn(self) -> None:
        if self.turns is not None and self.turns.due:
            self.meet()
            if self.turns.due:  # the meeting may have restarted them
                with self.noting_failure():
                    self.turns.take()

    @contextmanager
    def noting_failure(self) -> Iterator[None]:
        """Note a failure, so that further steps are refused."""
        try:
            yield
        except BaseException as error:
            self.failed(error)
            raise

    def end_updates(self, optimizer: torch.optim.Optimizer) -> None:
        """End an exchange of updates, after a step of this optimizer."""
        if self._announcement.is_due:
            self._announcement.say(self.spec, of_updates(optimizer, self.updates), self.turns)
        if self.turns is not None:
            self.turns.note_step()
            self._take_turn()

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
        if not self.axes:
            yield from self._meet(leader, follows)
            return
        error: ValueError | None = None
        try:
            yield from self._meet(leader, follows)
        except ValueError as differ:
            error = differ
        for axis in self.axes:
            differ_in = str(error or "agree").rpartition("equal on all ranks: ")[2]  # as much as a record has room for
            try:
                terms = {name: text for name, text in self._terms().items() if name not in self.door.agreed}
                yield from axis.compare(terms | {"replicas": differ_in}, 0, None)
                yield from axis.learn_hosts()
            except ValueError as differ:
                error = error or differ
        if error is not None:
            self.membership.part()
            raise error

    def _meet(self, leader: int | None, follows: bool) -> Flow[None]:
        membership, steps = self.membership, self.reducer.steps_done
        of_leader, joins = yield from membership.compare(self._terms(), steps, leader)
        if joins:
            state.scale_state(self.reducer, 0.0)
        elif of_leader != steps and not (leader is not None and self.resume.go_back(of_leader)) and steps:
            text = "gradcomp: the residual of rank %d is of step %d, but all ranks go on after step %d"
            log.warning(text, self.network.world.number(self.network.world.rank), steps, of_leader)
        if follows and self.turns is not None:  # ranks that are new to a training have another compressor
            self._stock = None
            compressor = self.turns.restart((yield from membership.of_leader(self.spec)))
            if str(compressor) != self.spec:
                self.install(state.carry(self.reducer, self.make_reducer(compressor)), compressor)
        if membership.grows and self.reducer.on_updates:  # a rank that joins has not seen the optimizers step
            parts = json.loads((yield from membership.of_leader(json.dumps(self.reducer.part_of_layer))))
            if parts != self.reducer.part_of_layer:
                self.updates.optimizers.parts = parts
                self.reducer = state.regroup(self.reducer, self.make_reducer(self.compressor))
        yield from membership.settle(self.reducer, self.sums)

    def _terms(self) -> dict[str, str]:
        """Describe all that must be equal on all ranks."""
        own = {"gradcomp's version": _version.VERSION, "spec": self.spec if self.turns is None else str(self.turns)}
        choice = {"telemetry": str(self._observer or "off"), "auto": str(self.turns or "off")}
        return own | self.options.terms | choice | self.slots.terms() | self.door.agreed

    def watch(self, observer: Any) -> None:
        """Tell telemetry's observer of all steps. The ranks meet again: their observers' joint acts must be equal."""
        self.note("watch()")
        before = self._observer
        self.observe(observer)
        if self.has_met:
            self.membership.part()
            try:
                self.meet()
            except BaseException:
                self.observe(before)
                raise

    def observe(self, observer: Any) -> None:
        """Tell an observer of all steps; None for no longer. See watch()."""
        self._observer = observer
        self.reducer.watch(observer)
