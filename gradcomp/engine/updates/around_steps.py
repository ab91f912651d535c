"""A session's part in the steps of the user's optimizers: what happens before and after each of them."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from gradcomp.engine import state
from gradcomp.engine.phases import Phase
from gradcomp.engine.updates.hidden_momentum import HiddenMomentum
from gradcomp.engine.updates.step_exchange import StepExchange
from gradcomp.engine.updates.steps import give_up_failed, makes_state


class AroundSteps:
    """The acts of one session around steps, which steps.py calls.

    exchange: what is known of the optimizers. has_gradients: some have come since the last step; has_unchecked_gradients: since
    the last end of a backward pass; has_seen_gradients: ever. lags: other ranks step, and this one has no batch.
    """

    session: Any  # which has this object

    def __init__(self, session: Any, exchange: StepExchange):
        self.session, self.exchange = weakref.proxy(session), exchange
        self.has_gradients = self.has_unchecked_gradients = self.has_seen_gradients = self.lags = False
        self.show, self.note_loaded, self.give_up = exchange.show, exchange.note_loaded, exchange.give_up

    def end_backward(self) -> Tensor | None:
        """End a backward pass whose gradients stay this rank's own. Return 0 if all ranks' are finite, otherwise NaN.

        None where nothing needs to be said: on one rank, or in a closure of a step, whose calls are each rank's own.
        """
        session = self.session
        if session.last_phase is Phase.FAILED:
            session.note("the end of a step")
        self.has_unchecked_gradients = False
        give_up_failed()
        session.meet()
        try:
            return self.exchange.end_backward(session.reducer.steps_done)
        except BaseException as error:
            session.failed(error)
            raise

    def step_with_others(self) -> None:
        """Take part in the exchanges of other ranks' steps: those that followed this rank's last backward pass."""
        for optimizer in self.exchange.take_stepped():
            self.before(optimizer)
            self.after(optimizer)

    def before(self, optimizer: torch.optim.Optimizer, has_closure: bool = False) -> HiddenMomentum | None:
        """Begin a step. Return the momentum to hide; None if nothing is exchanged. has_closure: gradients may come in it."""
        session, door = self.session, self.session.door
        has_gradients = self.has_gradients or has_closure
        if not session.network.ready or (not has_gradients and makes_state()):
            return None
        waits = self.has_unchecked_gradients or not (self.has_seen_gradients or has_closure)
        if door.needs_gradients and (waits or door.calls_another(optimizer, has_gradients)):
            return None
        if (trained := self.exchange.find_stepping(optimizer, session.given_momentum)) is None:
            return None
        if session.last_phase is Phase.FAILED:
            session.note("the optimizer's step")
        session.meet()
        try:
            if trained.reducer is not session.reducer:
                session.sums = self.exchange.adds_up(optimizer, trained, door.adds_up(optimizer), session.sums)
                if self.exchange.parts != session.reducer.parts:  # an optimizer is new
                    old = session.reducer
                    session.reducer = state.regroup(old, session.make_reducer(session.compressor))
                    self.exchange.carry_starts(old, session.reducer)
            self.exchange.begin(optimizer, trained, session.reducer)
        except BaseException as error:
            session.failed(error)
            raise
        return trained.momentum

    def after(self, optimizer: torch.optim.Optimizer) -> None:
        """Exchange the updates of an optimizer that has stepped."""
        if (trained := self.exchange.trained(optimizer)) is None or not trained.has_begun:
            return
        session = self.session
        try:
            self.exchange.end(optimizer, trained, float(session.network.world.size) if session.sums else 1.0)
        except BaseException as error:
            session.failed(error)
            raise
        self.has_gradients = False
        session.end_updates(optimizer)

    def discard(self) -> None:
        """Discard a step under way."""
        self.exchange.discard()
        self.has_gradients = self.has_unchecked_gradients = False
