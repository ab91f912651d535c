"""Sessions: one model's exchanges behind a door, from its first step to its last."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gradcomp.engine.sessions.membership import Snapshot
from gradcomp.engine.sessions.stepping import Stepping
from gradcomp.engine.sessions.turns import Turns
from gradcomp.engine.states import checkpoint, succession
from gradcomp.engine.states.packed import States
from gradcomp.engine.steps.step_observer import StepObserver
from gradcomp.protocol import Compressor


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
        flat = checkpoint.residual(self.reducer)
        return {slot.name: slot.shaped(flat[slot.name]) for slot in self.parameters.slots}

    def change(self, compressor: Compressor) -> None:
        """Continue with another compressor, and carry residuals over. The ranks meet again at once if they have met before."""
        self._guard.refuse_in_step("change()")
        self.training.refuse_before_step("change()")
        self.go_on_with(compressor)

    def go_on_with(self, compressor: Compressor, stock: torch.dtype | None = None, drops: bool = False) -> None:
        """Continue with another compressor, in a turn of all ranks.

        stock: the type in which the stock framework is to exchange gradients that are not watched, in place of the compressor.
        drops: nothing waits in the residual, and the compressor need not keep one.
        """
        before = self.reducer, self._compressor
        compressor = compressor if drops else succession.successor(compressor, self.reducer)
        changed = succession.carry(self.reducer, self._make_reducer(compressor))
        handed_back = self.training.arrays_to_hand_back(self.reducer, changed)
        self.reducer, self._compressor = changed, compressor
        if self.has_met or handed_back:
            try:
                self._membership.meet(self.reducer, self._terms())
                if handed_back:
                    self.training.hand_back(before[0], changed, handed_back)
            except BaseException as error:
                self.reducer, self._compressor = before
                if not isinstance(error, ValueError):  # which all ranks get
                    self.failed(error)
                raise
        self._stock = stock

    def state_dict(self) -> dict[str, Any]:
        """Copy all that this rank's next step depends on."""
        self._guard.refuse_in_step("state_dict()")
        share = checkpoint.save(self.reducer, self.parameters.shapes, sums=self._membership.sums)
        return self._membership.pack(self.spec, share)

    def load_state_dict(self, state: Any) -> None:
        """Continue from a state, or from the list of all ranks' states. The ranks meet at once if they have met before."""
        place = self._membership.place
        try:
            loaded = States(state, self.spec)
            taken = loaded.take(place)
            copy = checkpoint.prepare(self.reducer, self.parameters.shapes, taken.shares, loaded.steps, taken.factor)
        except Exception as error:
            if self.has_met:
                self.network.tell_failure(error)  # the others may load, and wait for this rank
            raise
        meet_again = self.has_met or self._guard.failed
        self._discard_step()
        copy()
        self._membership.note_loaded(taken, loaded)
        self.training.note_loaded(self.reducer)
        self._guard.forgive()
        if meet_again:
            self._note_failure(self.meet)

    def snapshot(self) -> Snapshot:
        """Copy to main memory what restore() needs."""
        self._guard.refuse_in_step("commit()")
        share = checkpoint.save(
            self.reducer, self.parameters.shapes, sums=self._membership.sums, copy=checkpoint.to_main_memory
        )
        return Snapshot(self._compressor, checkpoint.in_main_memory(share), self._membership.owner)

    def restore(self, snapshot: Snapshot) -> None:
        """Return to a snapshot, also in the middle of a step or after one that failed. The ranks then meet again."""
        share = snapshot.share
        if snapshot.compressor is not self._compressor:  # change() came after the commit
            self.reducer, self._compressor = self._make_reducer(snapshot.compressor), snapshot.compressor
        copy = checkpoint.prepare(self.reducer, self.parameters.shapes, {0: share}, share["steps"], trusted=True)
        self._discard_step()
        copy()
        self._membership.restore(snapshot.owner, share["sums"])
        self.training.note_loaded(self.reducer)
        self._guard.forgive()
