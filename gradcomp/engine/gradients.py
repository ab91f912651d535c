"""The exchange of gradients within backward passes: which are ready, who exchanges them, and when the ranks must meet first."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradcomp.engine.phases import Phase
from gradcomp.engine.slots import Slot


class GradientExchange:
    """The exchange of gradients of one session. Where updates are exchanged, it only notes that a backward pass goes on."""

    def __init__(self, session: Any):
        """session: has this object."""
        self._session = weakref.proxy(session)
        self._held: dict[str, Slot] = {}  # until the ranks have met
        self._stock: torch.dtype | None = None

    def let_stock_exchange(self, stock: torch.dtype | None) -> None:
        """Let the stock framework exchange gradients that are not watched, in this type. None: the session does."""
        self._stock = stock

    @property
    def stock(self) -> torch.dtype | None:
        """The widest type in which the stock framework is to exchange gradients. None: the session does, or ranks must meet."""
        is_its_turn = self._stock is not None and self._session.reducer.observer is None and self._session.has_met
        return self._stock if is_its_turn else None

    def begin(self) -> None:
        """Begin a step, or go on with it."""
        session, phases = self._session, self._session.phases
        if phases.since is (here := session.network.generation):
            if phases.last is Phase.EXCHANGING:
                return
            phases.note("a gradient", here)  # refuses it after a failure
        elif phases.since is not None:  # the network was initialised anew in a step, or after one that failed
            session.recover()
        if session.turns is not None and not (session.door.holds or session.reducer.on_updates):
            session.take_turn()
        updates, reducer = session.updates, session.reducer
        updates.has_gradients = updates.has_unchecked_gradients = updates.has_seen_gradients = True
        if not reducer.on_updates:
            phases.note("a gradient", here)
        if self._stock is not None and reducer.clock is not None:
            reducer.clock.note_gradient()

    def ready(self, slot: Slot) -> None:
        """Note that a parameter's gradient is complete. The last one of a bucket starts the bucket's exchange."""
        session, phases = self._session, self._session.phases
        here = session.network.generation
        if phases.since is not here or phases.last is not Phase.EXCHANGING:
            self.begin()
        has_met = session.membership.met_in is here
        if session.door.holds and (not has_met or (session.turns is not None and session.turns.due)):
            self._held[slot.name] = slot
        elif not session.reducer.on_updates:
            if not has_met:
                session.meet()
            self._hand_over(slot)

    def ready_all(self, slots: Sequence[Slot], grads: Sequence[Tensor]) -> None:
        """Note several complete gradients of a step that has begun."""
        session = self._session
        if session.membership.met_in is not session.network.generation:
            session.meet()
        try:
            session.reducer.ready_all(slots, grads)
        except BaseException as error:
            session.failed(error)
            raise

    def _hand_over(self, slot: Slot) -> None:
        session = self._session
        try:
            if self._stock is None or self.stock is None:
                session.slots.are_read = True
                session.reducer.ready_all((slot,), (slot.read(),))
            else:
                session.door.start_stock_allreduce(slot)
        except BaseException as error:
            session.failed(error)
            raise

    def finish(self, scale: float = 1.0) -> None:
        """Finish the step: the gradients are then scale times the mean update. Only the first call in a step acts."""
        session, phases = self._session, self._session.phases
        if phases.since is None:
            return
        if phases.last is Phase.FAILED:
            phases.note("the end of a step")
        if self._held:
            self._release()
            if phases.since is None:  # a turn has led to an exchange of updates
                return
        if self._stock is None or self.stock is None:
            try:
                session.reducer.finish(scale)
            except BaseException as error:
                session.failed(error)
                raise
        else:
            session.reducer.note_stock_step(session.slots.bytes_in(self._stock))
        phases.note("the end of a step", phases.since)
        if session.slots.are_read:
            session.slots.close()
        if session.turns is not None:
            session.turns.note_step()
        if session.announcement.is_due:
            session.announcement.say(session.spec, "exchanges gradients", session.turns)

    def _release(self) -> None:
        """Hand over the gradients that were held until the ranks have met."""
        session = self._session
        session.meet()
        session.take_turn()
        held, self._held = self._held, {}
        if session.reducer.on_updates:
            session.phases.note("the end of a step")
            return
        for slot in held.values():
            self._hand_over(slot)

    def discard(self) -> None:
        """Discard the step under way."""
        self._held.clear()
