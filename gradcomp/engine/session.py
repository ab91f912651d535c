"""A session: one model's exchanges on one rank, behind a door, from its first step to its last."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gradcomp import _version
from gradcomp.core.compressor import Compressor
from gradcomp.engine import state
from gradcomp.engine.changed_gradients import GradientSample
from gradcomp.engine.last_exchange import TRIAL, LastExchange
from gradcomp.engine.meeting import Flow, Membership, Snapshot, run
from gradcomp.engine.optimizer_steps import Announcement, MissingExchange, UnknownScaler, listen
from gradcomp.engine.optimizer_view import OptimizerView
from gradcomp.engine.phases import REFUSED, Door, Phase
from gradcomp.engine.reducer import Options, Reducer
from gradcomp.engine.several_optimizers import view_of
from gradcomp.engine.slots import Slot, Slots
from gradcomp.networks import Connection

log = logging.getLogger("gradcomp")


class Session:
    """One model's exchanges on one rank. reducer: of the present compressor.

    view: of the optimizer; simulated ranks share one, and one of them listens to its steps. turns: auto's Chooser, or None.
    """

    reducer_class: type[Reducer] = Reducer

    def __init__(
        self,
        compressor: Compressor,
        slots: Slots,
        network: Connection,
        options: Options,
        door: Door,
        view: OptimizerView | None = None,
    ):
        self.slots, self.network, self.options, self.door = slots, network, options, door
        self.view: OptimizerView = view or view_of(slots, options.optimizer, options.scaler)
        self.turns, self._observer = None, None  # type: Any, Any  # the second is telemetry's
        self._by_name = {slot.name: slot for slot in slots.slots}
        self._membership = Membership(network)
        self._step_in: object = None  # the network's generation in which the step under way began; None between steps
        self._failure: tuple[object, str] | None = None  # the generation in which a step failed, and the error's text
        self._held: dict[str, Slot] = {}
        self._stock: torch.dtype | None = None
        self._sample = GradientSample(len(slots.slots), door.changed)
        self._missing, self._scaler = MissingExchange(slots, network, door.unused), UnknownScaler(options.scaler)
        self.last, self.announcement = LastExchange(slots, self.view, TRIAL if view is None else 0), Announcement()
        # Ranks may differ by one commit where one of them fails while the others commit.
        self._commits: deque[Snapshot] = deque(maxlen=2)
        self._install(self._make_reducer(compressor), compressor)
        if view is None:
            listen(self)

    def _make_reducer(self, compressor: Compressor) -> Reducer:
        self.view.check_momentum(compressor)
        reducer = self.reducer_class(compressor, self._by_name, self.network, self.options, self.view)
        reducer.observer = self._observer
        return reducer

    def _install(self, reducer: Reducer, compressor: Compressor) -> None:
        """Continue with a reducer. The momentum is left to the optimizer from now on if not every bucket applies it."""
        self.last.settle()
        self.reducer, self.compressor, self._stock, self.announcement.due = reducer, compressor, None, True
        if not reducer.takes_momentum:
            self.view.leave()

    # The phase.

    @property
    def phase(self) -> Phase:
        """The present phase. This waits for a device if an update waits for the optimizer."""
        here = self.network.generation
        if self._failure is not None and self._failure[0] is here:
            return Phase.FAILED
        if self._step_in is not None:
            return Phase.BACKWARD
        if self.view.update_waits:
            return Phase.DELIVERED
        return Phase.IDLE if self.has_met else Phase.UNMET

    def refuse(self, event: str) -> None:
        """Raise an error if the present phase refuses an event."""
        phase = self.phase
        if (message := REFUSED[event].get(phase)) is None:
            return
        reason = "" if self._failure is None else self._failure[1]
        remedy = self.door.after_failure if phase is Phase.FAILED else ""
        raise RuntimeError(message.format(event=event, reason=reason) + remedy)

    @property
    def has_met(self) -> bool:
        """True if the ranks have met since the network was last initialised."""
        return self._membership.has_met

    def failed(self, error: BaseException) -> BaseException:
        """Note that this rank's step failed, and return the error. Further steps are refused until the ranks meet again."""
        self._membership.part()
        self._discard_step()
        self._failure = self.network.generation, f"{type(error).__name__}: {error}"
        self.view.note_exchange()  # its steps are refused from now on, also before the first exchange
        return error

    def recover(self) -> None:
        """Discard the step under way, and allow steps again after one that failed."""
        self._discard_step()
        self._failure = None

    def _discard_step(self) -> None:
        """Discard the step under way. The entries that it has taken from the residual are lost."""
        self.last.settle()
        self.reducer.abort()
        self._sample.discard()
        self._held.clear()
        self._step_in = None

    # A step.

    @property
    def spec(self) -> str:
        return str(self.compressor)

    @property
    def stock(self) -> torch.dtype | None:
        """The widest type in which the stock framework is to exchange gradients. None: the session does, or ranks must meet."""
        return self._stock if self._stock is not None and not self.is_watched and self.has_met else None

    @property
    def _turn_is_due(self) -> bool:
        return self.turns is not None and self.turns.due

    def slot(self, parameter: Tensor) -> Slot:
        """Find the slot of a parameter. Refuse an unknown parameter."""
        if (slot := self.slots.slot(parameter)) is None:
            raise self.failed(ValueError(self.door.unknown.format(shape=tuple(parameter.shape))))
        return slot

    def begin(self, first: Slot | None = None) -> None:
        """Begin a step, or go on with it. first: the slot of its first gradient, if it is known."""
        here = self.network.generation
        if self._step_in is here:
            return
        if self._failure is not None:
            self.refuse("a gradient")
            self._failure = None
        if self._step_in is not None:  # the network was initialised anew
            self._discard_step()
        self.last.begin(self.turns or (None if self.reducer.repeats else self.compressor), first)
        if not self.door.holds:
            self._take_turn()
        self._step_in = here
        self.view.note_exchange()
        if self.stock is not None:
            self.reducer.clock.note_gradient()

    def ready(self, slot: Slot) -> None:
        """Note that a parameter's gradient is complete. The last one of a bucket starts the bucket's exchange."""
        holds = self.door.holds and (not self.has_met or self._turn_is_due)
        if self._step_in is not self.network.generation:
            self.begin(slot)
        if holds or self.stock is None:  # the stock framework writes sums into the gradient
            self._sample.keep(slot)
        if holds:
            self._held[slot.name] = slot
        else:
            self._hand_over(slot)

    def ready_all(self, slots: Sequence[Slot], grads: Sequence[Tensor]) -> None:
        """Note several complete gradients of a step that has begun."""
        self.meet()
        try:
            self.last.keep(self.reducer, slots)
            self.reducer.ready_all(slots, grads)
        except BaseException as error:
            self.failed(error)
            raise

    def _hand_over(self, slot: Slot) -> None:
        self.meet()
        try:
            if self.stock is None:
                self.last.keep(self.reducer, (slot,))
                self.reducer.ready(slot)
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
        self._release()
        if self.stock is None:
            with self._noting_failure():
                self.reducer.finish(scale)
            self.last.end(self.reducer, watches=not self.door.ends_in_backward)
        self._end_step(scale)

    def _release(self) -> None:
        """Hand over the gradients that were held until the ranks have met."""
        with self._noting_failure():
            self._sample.check()
        if self._held:
            self.meet()
            self._take_turn()
        held, self._held = self._held, {}
        for slot in held.values():
            self._hand_over(slot)

    def _end_step(self, scale: float) -> None:
        if self.stock is not None:
            self.reducer.note_stock_step(self.slots.bytes_in(self.stock))
        elif self.network.world.size > 1:  # the scale is 1 for a mean, and for one rank it says nothing
            self.view.sums = scale != 1.0
        self._step_in = None
        self.slots.close()
        if self.turns is not None:
            self.turns.note_step()

    def _take_turn(self) -> None:
        if self._turn_is_due:
            self.meet()
            if self.turns is not None and self.turns.due:  # the meeting may have restarted them
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

    # The optimizer's step. optimizer_steps calls these three.

    def check_step(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
        """Check an optimizer that is about to step. has_closure: it may call a closure, and that several times."""
        if not self.last.enter_step(optimizer, self.view.check_step(optimizer, self.compressor), has_closure):
            self.announcement.look_at_copies(self, optimizer)
            return
        if self._failure is not None:
            self.refuse("the optimizer's step")
        if self._step_in is not None and self.door.ends_in_backward:
            with self._noting_failure():
                self.refuse("the optimizer's step")
        self.reducer.note_rates()
        if keeps_state := self.reducer.keeps_state or self.view.taken:
            self._scaler.look()
        self.view.refuse_misuse(optimizer, keeps_state)
        self.announcement.look(self)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the momentum out of an optimizer that is about to step. A step() that synchronizes before calls another one."""
        if self._step_in is None and (self.last.is_nested or self.view.steps_at_once(optimizer)):
            self.view.before_step(optimizer)
        if self.door.unused:
            self._missing.before_step(optimizer, self.compressor)

    def after_step(self) -> None:
        """Show the optimizer's values again."""
        self.view.show()
        self._missing.after_step()
        self.last.leave_step()

    # Between two steps.

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
        yield from membership.settle(self.reducer, self.view.sums)

    def _terms(self) -> dict[str, str]:
        """Describe all that must be equal on all ranks."""
        own = {"gradcomp's version": _version.VERSION, "spec": self.spec if self.turns is None else str(self.turns)}
        choice = {"telemetry": str(self._observer or "off"), "auto": str(self.turns or "off")}
        return own | self.options.terms | choice | self.view.terms | self.slots.terms()

    @property
    def is_watched(self) -> bool:
        """True if an observer is told of all steps."""
        return self._observer is not None

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
        self._observer = self.reducer.observer = observer

    def replace(self, compressor: Compressor | None, stock: torch.dtype | None = None, *, drops: bool = False) -> None:
        """Continue with another compressor, and carry residuals over. The ranks meet again at once if they have met before.

        compressor: None keeps the present one. stock: the type in which the stock framework is to exchange gradients that are
        not watched, in place of the compressor. drops: the residual is empty, and the compressor need not keep one.
        """
        if compressor is not None:
            run(self.replacing(compressor, drops=drops))
        self._stock = stock

    def replacing(self, compressor: Compressor, *, drops: bool = False) -> Flow[None]:
        """Replace the compressor in lock-step with other ranks. See replace()."""
        old, before = self.reducer, self.compressor
        compressor = compressor if drops else state.successor(compressor, old)
        new = state.carry(old, self._make_reducer(compressor))
        returned = state.moments_to_return(old, new)
        self.reducer, self.compressor = new, compressor
        if self.has_met or returned:
            try:
                yield from self.meeting(follows=False)
                if returned:
                    yield from state.return_moments(old, new, returned)
            except BaseException as error:
                self.reducer, self.compressor = old, before
                if not isinstance(error, (ValueError, GeneratorExit)):  # an error that all ranks get, or another rank's
                    self.failed(error)
                raise
        self._install(new, compressor)

    # The state.

    def residual(self) -> dict[str, Tensor]:
        """Copy this rank's residual, by name, in the parameters' shapes."""
        flat = {slot.name: torch.zeros(slot.layer.size, device=slot.layer.device) for slot in self.slots.slots}
        for bucket in self.reducer.buckets:
            flat |= bucket.copied_residual()
        return {slot.name: slot.shaped(flat[slot.name]) for slot in self.slots.slots}

    def share(self, copy: Callable[[Tensor], Tensor] = Tensor.clone) -> dict[str, Any]:
        """Copy this rank's share of a state, from before an exchange that will probably be undone."""
        return self.last.share_before or state.save_share(self.reducer, self.slots.shapes, sums=self.view.sums, copy=copy)

    def state_dict(self) -> dict[str, Any]:
        """Copy all that this rank's next step depends on."""
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
        load = state.load_shares(reducer, self.slots.shapes, taken, loaded.steps)
        meets_again = self.has_met or self.phase is Phase.FAILED
        yield
        self._go_on_from(load, reducer, compressor)
        self._membership.note_loaded(taken.of, loaded.ranks)
        self.view.sums = loaded.sums
        if meets_again:
            with self._noting_failure():
                yield from self.meeting()

    def commit(self) -> None:
        """Keep a copy of the state in main memory, beside the last one, for a training that rolls back."""
        self.refuse("commit()")
        self._commits.append(
            Snapshot(self.compressor, state.in_main_memory(self.share(lambda view: view)), self._membership.owner)
        )

    def roll_back(self) -> None:
        """Return to the last commit, also in the middle of a step or after one that failed. The ranks then meet again."""
        if self._commits:
            self._restore(self._commits[-1])

    def sync(self) -> None:
        """Meet the other ranks, and go on where rank 0 goes on, since all take rank 0's weights."""
        self.meet(leader=0)

    def _go_back(self, steps: int) -> bool:
        """Return to the newest commit after these steps, of the present spec unless auto chooses. False: there is none."""
        for kept in reversed(self._commits):
            if kept.share["steps"] == steps and (self.turns is not None or str(kept.compressor) == self.spec):
                self._restore(kept)
                return True
        return False

    def _restore(self, snapshot: Snapshot) -> None:
        share, reducer = snapshot.share, self.reducer
        if snapshot.compressor is not self.compressor:  # change() came after the commit
            reducer = self._make_reducer(snapshot.compressor)
        load = state.load_own(reducer, self.slots.shapes, share)
        self._go_on_from(load, reducer, snapshot.compressor)
        self._membership.restore(snapshot.owner)
        self.view.sums = share["sums"]

    def _go_on_from(self, load: Callable[[], None], reducer: Reducer, compressor: Compressor) -> None:
        self.recover()
        self._install(reducer, compressor)
        self.view.forget_update()
        load()
        self.view.note_loaded(any(bucket.has_moments for bucket in reducer.buckets))
