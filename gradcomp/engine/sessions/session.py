"""Sessions: one model's exchanges behind a door, from its first step to its last."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradcomp.core.compressor import Compressor
from gradcomp.engine.sessions.membership import Snapshot
from gradcomp.engine.sessions.stepping import Stepping
from gradcomp.engine.sessions.turns import Turns
from gradcomp.engine.state import (
    States,
    carry,
    in_main_memory,
    load_shares,
    residuals,
    save_share,
    spec_of,
    successor,
    to_main_memory,
)
from gradcomp.engine.steps.reducer import Reducer
from gradcomp.engine.steps.step_observer import StepObserver


class Prepared(NamedTuple):
    """A compressor, and its reducer with all that waits."""

    compressor: Compressor
    reducer: Reducer


class Session(Stepping):
    """One model's exchanges on one rank: its steps, and what happens between them."""

    def watch(self, observer: StepObserver, telemetry: str) -> None:
        """Tell an observer of all steps. The ranks meet again: what their observers do together must be equal."""
        self._guard.refuse_in_step("watch()")
        before, self.options = self.options, replace(self.options, observer=observer, telemetry=telemetry)
        self.reducer.observer = observer
        if self.has_met:
            self._membership.part()
            try:
                self.meet()
            except BaseException:
                self.options, self.reducer.observer = before, before.observer
                raise

    def choose_in(self, turns: Turns | None, auto: str) -> None:
        """Choose compressors in turns from now on, or no longer. auto: what chooses; the ranks compare it when they meet."""
        self.turns, self.options = turns, replace(self.options, auto=auto)

    def residual(self) -> dict[str, Tensor]:
        """Copy this rank's residual, by name, in the parameters' shapes."""
        flat = residuals(self.reducer)
        return {slot.name: slot.shaped(flat[slot.name]) for slot in self.parameters.slots}

    def change(self, compressor: Compressor) -> None:
        """Continue with another compressor, and carry residuals over. The ranks meet again at once if they have met before."""
        self._guard.refuse_in_step("change()")
        self.training.refuse_before_step("change()")
        self.go_on_with(self.prepare(compressor))

    def prepare(self, compressor: Compressor, drops: bool = False) -> Prepared:
        """Prepare to continue with another compressor. Refuse one that does not suit the training.

        drops: nothing waits in the residual, and the compressor need not keep one.
        """
        compressor = compressor if drops else successor(compressor, self.reducer)
        return Prepared(compressor, carry(self.reducer, self._make_reducer(compressor)))

    def go_on_with(self, prepared: Prepared, stock: torch.dtype | None = None) -> None:
        """Continue with what was just prepared, in a turn of all ranks.

        stock: the type in which the stock framework is to exchange gradients that are not watched, in place of the compressor.
        """
        before, changed = (self.reducer, self._compressor), prepared.reducer
        handed_back = self.training.arrays_to_hand_back(self.reducer, changed)
        self.reducer, self._compressor = changed, prepared.compressor
        if self.has_met or handed_back:
            try:
                self._membership.meet(lambda: self.reducer, self._terms())
                if handed_back:
                    self.training.hand_back(before[0], changed, handed_back)
            except BaseException as error:
                self.reducer, self._compressor = before
                if not isinstance(error, ValueError):  # which all ranks get
                    self.failed(error)
                raise
        self.exchange_by(stock)

    def exchange_by(self, stock: torch.dtype | None) -> None:
        """Continue with the stock framework's exchange in this type, or with the session's own, in a turn of all ranks."""
        self._stock = stock

    def state_dict(self) -> dict[str, Any]:
        """Copy all that this rank's next step depends on."""
        self._guard.refuse_in_step("state_dict()")
        share = save_share(self.reducer, self.parameters.shapes, sums=self._membership.sums)
        return self._membership.pack(self.spec, share)

    def load_state_dict(self, state: Any, make: Callable[[str], Compressor] | None = None) -> None:
        """Continue from a state, or from the list of all ranks' states. The ranks meet at once if they have met before.

        make: makes the compressor of the state's spec, with which the session then continues; by default it keeps its own.
        """
        place = self._membership.place
        spec = self.spec if make is None else spec_of(state) or self.spec
        loaded = States(state, spec)
        taken = loaded.take(place)
        kept = make is None or spec == self.spec
        compressor = self._compressor if kept or make is None else make(spec)
        reducer = self.reducer if kept else self._make_reducer(compressor)
        copy = load_shares(reducer, self.parameters.shapes, taken.shares, loaded.steps, taken.factor, adam=taken.adam)
        meet_again = self.has_met or self._guard.failed
        self._discard_step()
        self.reducer, self._compressor, self._stock = reducer, compressor, None
        copy()
        self._membership.note_loaded(taken, loaded)
        self.training.note_loaded(self.reducer)
        self._guard.forgive()
        if meet_again:
            self._note_failure(self.meet)

    def snapshot(self) -> Snapshot:
        """Copy to main memory what restore() needs."""
        self._guard.refuse_in_step("commit()")
        share = save_share(self.reducer, self.parameters.shapes, sums=self._membership.sums, copy=to_main_memory)
        return Snapshot(self._compressor, in_main_memory(share), self._membership.owner)

    def restore(self, snapshot: Snapshot) -> None:
        """Return to a snapshot, also in the middle of a step or after one that failed. The ranks then meet again."""
        share = snapshot.share
        if snapshot.compressor is not self._compressor:  # change() came after the commit
            self.reducer, self._compressor = self._make_reducer(snapshot.compressor), snapshot.compressor
        copy = load_shares(self.reducer, self.parameters.shapes, {0: share}, share["steps"], trusted=True)
        self._discard_step()
        copy()
        self._membership.restore(snapshot.owner, share["sums"])
        self._stock = None
        self.training.note_loaded(self.reducer)
        self._guard.forgive()
