"""A session: one model's exchanges on one rank, behind a door, from its first step to its last."""

from __future__ import annotations

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
from gradcomp.engine.commits import Commits
from gradcomp.engine.meeting import Flow, Membership, Snapshot, run
from gradcomp.engine.phases import Door, Phase, refuse
from gradcomp.engine.reducer import Options, Reducer
from gradcomp.engine.slots import Slot, Slots
from gradcomp.engine.updates.hidden_momentum import HiddenMomentum
from gradcomp.engine.updates.step_exchange import StepExchange
from gradcomp.engine.updates.steps import give_up_failed, ignore, listen, makes_state
from gradcomp.engine.updates.to_gradients import deliver_residuals
from gradcomp.networks import Connection

log = logging.getLogger("gradcomp")


class Session:
    """One model's exchanges on one rank. reducer: of the present compressor. turns: auto's Chooser, or None.

    updates: what is known of the user's optimizers, where the door has any. sums: updates are sums over the ranks, not means.
    has_gradients: some have come since the last step; has_unchecked_gradients: since the last end of a backward pass;
    has_seen_gradients: ever. lags: other ranks step, and this one has no batch.
    """

    reducer_class: type[Reducer] = Reducer

    def __init__(self, compressor: Compressor, slots: Slots, network: Connection, options: Options, door: Door):
        self.slots, self.network, self.options, self.door = slots, network, options, door
        self.turns, self._observer = None, None  # type: Any, Any  # the second is telemetry's
        self._by_name = {slot.name: slot for slot in slots.slots}
        self._membership = Membership(network)
        self._step_in: object = None  # the network's generation in which the step under way began; None between steps
        self._failure: tuple[object, str] | None = None  # the generation in which a step failed, and the error's text
        self._held, self._stock = dict[str, Slot](), None  # type: Any, torch.dtype | None
        self.has_gradients = self.has_unchecked_gradients = self.has_seen_gradients = self.lags = self.sums = False
        self._commits, self._announcement = Commits(), Announcement(door, network)
        self.updates = updates = StepExchange(slots, network)
        self.show, self.note_loaded, self.give_up = updates.show, updates.note_loaded, updates.give_up  # called by steps.py
        self._install(self._make_reducer(compressor), compressor)

    def _make_reducer(self, compressor: Compressor) -> Reducer:
        on_updates = self.door.has_optimizers and compressor.traits.acts_on_updates
        if compressor.traits.rates == "needed" and not (on_updates or self.door.has_rates):
            raise ValueError(f"{compressor} needs the learning rates: pass optimizer=, or let it keep a residual")
        parts = self.updates.parts if on_updates else None
        reducer = self.reducer_class(compressor, self._by_name, self.network, self.options, parts, on_updates)
        reducer.watch(self._observer)
        return reducer

    def _install(self, reducer: Reducer, compressor: Compressor) -> None:
        """Continue with a reducer."""
        self.reducer, self.compressor, self._stock = reducer, compressor, None
        self._given_momentum = reducer.given_momentum
        self.updates.forget()
        (listen if reducer.on_updates else ignore)(self)  # an exchange of gradients looks at no optimizer

    @property
    def phase(self) -> Phase:
        if self._failure is not None and self._failure[0] is self.network.generation:
            return Phase.FAILED
        if self._step_in is not None:
            return Phase.BACKWARD
        return Phase.IDLE if self.has_met else Phase.UNMET

    def refuse(self, event: str) -> None:
        """Raise an error if the present phase refuses an event."""
        refuse(event, self.phase, "" if self._failure is None else self._failure[1], self.door.after_failure)

    @property
    def has_met(self) -> bool:
        """True if the ranks have met since the network was last initialised."""
        return self._membership.met_in is self.network.generation

    def failed(self, error: BaseException) -> BaseException:
        """Note that this rank's step failed, and return the error. Further steps are refused until the ranks meet again."""
        self._membership.part()
        self._discard_step()
        self._failure = self.network.generation, f"{type(error).__name__}: {error}"
        return error

    def recover(self) -> None:
        """Discard the step under way, and allow steps again after one that failed."""
        self._discard_step()
        self._failure = None

    def _discard_step(self) -> None:
        """Discard the step under way. The entries that it has taken from the residual are lost."""
        self.reducer.abort()
        self.updates.discard()
        self._held.clear()
        self._step_in = None
        self.has_gradients = self.has_unchecked_gradients = False
        self.door.discard()

    @property
    def spec(self) -> str:
        return str(self.compressor)

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
        if self._step_in is (here := self.network.generation):
            return
        if self._failure is not None:
            self.refuse("a gradient")
            self._failure = None
        if self._step_in is not None:  # the network was initialised anew
            self._discard_step()
        if self.turns is not None and not (self.door.holds or self.reducer.on_updates):
            self._take_turn()
        self.has_gradients = self.has_unchecked_gradients = self.has_seen_gradients = True
        self._step_in = None if self.reducer.on_updates else here
        if self._stock is not None and self.reducer.clock is not None:
            self.reducer.clock.note_gradient()

    def ready(self, slot: Slot) -> None:
        """Note that a parameter's gradient is complete. The last one of a bucket starts the bucket's exchange."""
        here = self.network.generation
        if self._step_in is not here:
            self.begin()
        has_met = self._membership.met_in is here
        if self.door.holds and (not has_met or (self.turns is not None and self.turns.due)):
            self._held[slot.name] = slot
        elif not self.reducer.on_updates:
            if not has_met:
                self.meet()
            self._hand_over(slot)

    def ready_all(self, slots: Sequence[Slot], grads: Sequence[Tensor]) -> None:
        """Note several complete gradients of a step that has begun."""
        if self._membership.met_in is not self.network.generation:
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
        if self._failure is not None:
            self.refuse("the end of a step")
        if self._step_in is None:
            return
        if self._held:
            self._release()
            if self._step_in is None:  # a turn has led to an exchange of updates
                return
        if self._stock is None or self.stock is None:
            try:
                self.reducer.finish(scale)
            except BaseException as error:
                self.failed(error)
                raise
        else:
            self.reducer.note_stock_step(self.slots.bytes_in(self._stock))
        self._step_in = None
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
            self._step_in = None
            return
        for slot in held.values():
            self._hand_over(slot)

    def _take_turn(self) -> None:
        if self.turns is not None and self.turns.due:
            self.meet()
            if self.turns.due:  # the meeting may have restarted them
                with self._noting_failure():
                    self.turns.take()

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        """Note a failure, so that further steps are refused."""
        try:
            yield
        except BaseException as error:
            self.failed(error)
            raise

    # A step that exchanges updates. steps.py calls before() and after() around the steps of all optimizers.

    def end_local_backward(self) -> Tensor | None:
        """End a backward pass whose gradients stay this rank's own. Return 0 if all ranks' are finite, otherwise NaN.

        None where nothing needs to be said: on one rank, or in a closure of a step, whose calls are each rank's own.
        """
        if self._failure is not None:
            self.refuse("the end of a step")
        self.has_unchecked_gradients = False
        give_up_failed()
        self.meet()
        with self._noting_failure():
            return self.updates.end_backward(self.reducer.steps_done)

    def step_with_others(self) -> None:
        """Take part in the exchanges of other ranks' steps: those that followed this rank's last backward pass."""
        for optimizer in self.updates.take_stepped():
            self.before(optimizer)
            self.after(optimizer)

    def before(self, optimizer: torch.optim.Optimizer, has_closure: bool = False) -> HiddenMomentum | None:
        """Begin a step. Return the momentum to hide; None if nothing is exchanged. has_closure: gradients may come in it."""
        has_gradients = self.has_gradients or has_closure
        if not self.network.ready or (not has_gradients and makes_state()):
            return None
        waits = self.has_unchecked_gradients or not (self.has_seen_gradients or has_closure)
        if self.door.needs_gradients and (waits or self.door.calls_another(optimizer, has_gradients)):
            return None
        if (trained := self.updates.find_stepping(optimizer, self._given_momentum)) is None:
            return None
        if self._failure is not None:
            self.refuse("the optimizer's step")
        self.meet()
        try:
            if trained.reducer is not self.reducer:
                self.sums = self.updates.adds_up(optimizer, trained, self.door.adds_up(optimizer), self.sums)
                if self.updates.parts != self.reducer.parts:  # an optimizer is new
                    old, self.reducer = self.reducer, state.regroup(self.reducer, self._make_reducer(self.compressor))
                    self.updates.carry_starts(old, self.reducer)
            self.updates.begin(optimizer, trained, self.reducer)
        except BaseException as error:
            self.failed(error)
            raise
        return trained.momentum

    def after(self, optimizer: torch.optim.Optimizer) -> None:
        """Exchange the updates of an optimizer that has stepped."""
        if (trained := self.updates.trained(optimizer)) is None or not trained.has_begun:
            return
        try:
            self.updates.end(optimizer, trained, float(self.network.world.size) if self.sums else 1.0)
        except BaseException as error:
            self.failed(error)
            raise
        self.has_gradients = False
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
        """Meet in lock-step with other ranks. See meet(). follows: under auto, adopt the leader's compressor."""
        membership, steps = self._membership, self.reducer.steps_done
        of_leader, joins = yield from membership.compare(self._terms(), steps, leader)
        if joins:
            state.scale_state(self.reducer, 0.0)
        elif of_leader != steps and not (leader is not None and self._go_back(of_leader)) and steps:
            text = "gradcomp: the residual of rank %d is of step %d, but all ranks go on after step %d"
            log.warning(text, self.network.world.number(self.network.world.rank), steps, of_leader)
        if follows and self.turns is not None:  # ranks that are new to a training have another compressor
            self._stock = None
            compressor = self.turns.restart((yield from membership.of_leader(self.spec)))
            if str(compressor) != self.spec:
                self._install(state.carry(self.reducer, self._make_reducer(compressor)), compressor)
        yield from membership.settle(self.reducer, self.sums)

    def _terms(self) -> dict[str, str]:
        """Describe all that must be equal on all ranks."""
        own = {"gradcomp's version": _version.VERSION, "spec": self.spec if self.turns is None else str(self.turns)}
        choice = {"telemetry": str(self._observer or "off"), "auto": str(self.turns or "off")}
        return own | self.options.terms | choice | self.slots.terms()

    def watch(self, observer: Any) -> None:
        """Tell telemetry's observer of all steps. The ranks meet again: their observers' joint acts must be equal."""
        self.refuse("watch()")
        before = self._observer
        self.observe(observer)
        if self.has_met:
            self._membership.part()
            try:
                self.meet()
            except BaseException:
                self.observe(before)
                raise

    def observe(self, observer: Any) -> None:
        """Tell an observer of all steps; None for no longer. See watch()."""
        self._observer = observer
        self.reducer.watch(observer)

    def replace(self, compressor: Compressor | None, stock: torch.dtype | None = None) -> None:
        """Continue with another compressor, and carry residuals over. The ranks meet again at once if they have met before.

        compressor: None keeps the present one. stock: the type in which the stock framework is to exchange gradients that are
        not watched, in place of the compressor.
        """
        if compressor is not None:
            run(self.replacing(compressor))
        self._stock = stock

    def replacing(self, compressor: Compressor) -> Flow[None]:
        """Replace the compressor in lock-step with other ranks. See replace()."""
        old, before = self.reducer, self.compressor
        compressor = compressor if self.door.has_optimizers else state.successor(compressor, old)
        new = self._make_reducer(compressor)
        delivers = old.on_updates and not new.on_updates and old.steps_done > 0
        if old.on_updates == new.on_updates or not self.door.has_optimizers:
            new = state.carry(old, new)
        new.steps_done = old.steps_done
        self.reducer, self.compressor = new, compressor
        if self.has_met or delivers:
            try:
                yield from self.meeting(follows=False)
                if delivers:
                    self.updates.forget()
                    yield from deliver_residuals(old, self.updates.optimizers(), self.network, self.sums)
            except BaseException as error:
                self.reducer, self.compressor = old, before
                if not isinstance(error, (ValueError, GeneratorExit)):  # an error that all ranks get, or another rank's
                    self.failed(error)
                raise
        was_hidden = old.on_updates and (old.given_momentum is None or old.given_momentum.hides)
        self.updates.note_change(to_updates=new.on_updates and not was_hidden)
        self._install(new, compressor)

    def residual(self) -> dict[str, Tensor]:
        """Copy this rank's residual, by name, in the parameters' shapes."""
        return state.residuals(self.reducer, self.slots)

    def share(self, copy: Callable[[Tensor], Tensor] = Tensor.clone) -> dict[str, Any]:
        """Copy this rank's share of a state."""
        return state.save_share(self.reducer, self.slots.shapes, sums=self.sums, copy=copy)

    def state_dict(self) -> dict[str, Any]:
        """Copy all that this rank's next step depends on."""
        give_up_failed()
        self.refuse("state_dict()")
        place = self._membership.saved_place
        return state.pack(self.spec, place.ranks, {place.rank: self.share()})

    def load_state_dict(self, saved: Any, make: Callable[[str], Compressor] | None = None) -> None:
        """Continue from a state, or from the list of all ranks' states. The ranks meet at once if they have met before.

        make: makes the compressor of the state's spec, with which the session then continues; by default it keeps its own.
        """
        run(self.loading(saved, make))

    def loading(self, saved: Any, make: Callable[[str], Compressor] | None = None) -> Flow[None]:
        """Load a state in lock-step with other ranks. See load_state_dict()."""
        spec = self.spec if make is None else state.spec_of(saved) or self.spec
        loaded = state.States(saved, spec)
        taken = loaded.take(self._membership.place)
        reducer, compressor = self.reducer, self.compressor
        if make is not None and spec != self.spec:
            compressor = make(spec)
            reducer = self._make_reducer(compressor)
        if reducer.on_updates and (parts := state.saved_parts(taken.shares)) is not None:
            self.updates.parts = parts  # until the optimizers that they follow from are seen
            reducer = self._make_reducer(compressor)
        load = state.load_shares(reducer, self.slots.shapes, taken, loaded.steps)
        meets_again = self.has_met or self.phase is Phase.FAILED
        yield
        self._go_on_from(load, reducer, compressor)
        self._membership.note_loaded(taken.of, loaded.ranks)
        self.sums = loaded.sums
        if meets_again:
            with self._noting_failure():
                yield from self.meeting()

    def commit(self) -> None:
        """Keep a copy of the state in main memory, beside the last one, for a training that rolls back."""
        self.refuse("commit()")
        self._commits.keep(self.compressor, self.share, self._membership.owner)

    def roll_back(self) -> None:
        """Return to the last commit, also in the middle of a step or after one that failed. The ranks then meet again."""
        if (newest := self._commits.newest) is not None:
            self._restore(newest)

    def sync(self) -> None:
        """Meet the other ranks, and go on where rank 0 goes on, since all take rank 0's weights."""
        self.meet(leader=0)

    def _go_back(self, steps: int) -> bool:
        """Return to the newest commit after these steps, of the present spec unless auto chooses. False: there is none."""
        if (kept := self._commits.after(steps, self.spec if self.turns is None else None)) is not None:
            self._restore(kept)
        return kept is not None

    def _restore(self, snapshot: Snapshot) -> None:
        share, reducer = snapshot.share, self.reducer
        if snapshot.compressor is not self.compressor:  # change() came after the commit
            reducer = self._make_reducer(snapshot.compressor)
        load = state.load_own(reducer, self.slots.shapes, share)
        self._go_on_from(load, reducer, snapshot.compressor)
        self._membership.restore(snapshot.owner)
        self.sums = share["sums"]

    def _go_on_from(self, load: Callable[[], None], reducer: Reducer, compressor: Compressor) -> None:
        self.recover()
        self._install(reducer, compressor)
        self.updates.note_change(to_updates=False)
        load()
