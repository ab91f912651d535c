"""With what a session goes on: another spec, a loaded state, or a commit to which a training rolls back."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gradcomp.core.compressor import Compressor
from gradcomp.engine import state
from gradcomp.engine.meeting import Flow, Snapshot, run
from gradcomp.engine.phases import IN_STEP, Phase
from gradcomp.engine.updates.steps import give_up_failed
from gradcomp.engine.updates.to_gradients import deliver_residuals
from gradcomp.saved import reading


class Resume:
    """The ways of one session to another compressor or state.

    commits: the last two: ranks may differ by one where one of them fails while the others commit.
    """

    def __init__(self, session: Any):
        """session: has this object."""
        self._session: Any = weakref.proxy(session)
        self._commits: deque[Snapshot] = deque(maxlen=2)

    def change(self, compressor: Compressor | None, stock: torch.dtype | None = None) -> None:
        """Continue with another compressor, and carry residuals over. The ranks meet again at once if they have met before.

        compressor: None keeps the present one. stock: the type in which the stock framework is to exchange gradients that are
        not watched, in place of the compressor.
        """
        if compressor is not None:
            run(self.changing(compressor))
        self._session.gradients.let_stock_exchange(stock)

    def changing(self, compressor: Compressor) -> Flow[None]:
        """Change the compressor in lock-step with other ranks. See change()."""
        session = self._session
        give_up_failed()
        session.updates.optimizers.renew_parameters()
        old, before = session.reducer, session.compressor
        compressor = compressor if session.door.has_optimizers else state.successor(compressor, old)
        new = session.make_reducer(compressor)
        has_any = old.steps_done > 0 or session.updates.has_gradients
        delivers = has_any and old.on_updates and not new.on_updates
        if old.on_updates == new.on_updates or not session.door.has_optimizers:
            new = state.carry(old, new)
        new.steps_done = old.steps_done
        session.reducer, session.compressor = new, compressor
        if session.has_met or delivers:
            try:
                session.membership.unlike |= delivers
                yield from session.meeting(follows=False)
                if delivers:
                    yield from deliver_residuals(old, session.network, session.sums)
            except BaseException as error:
                session.reducer, session.compressor = old, before
                if not isinstance(error, (ValueError, GeneratorExit)):  # an error that all ranks get, or another rank's
                    session.failed(error)
                raise
        session.updates.optimizers.note_change()
        session.install(new, compressor)

    def residual(self) -> dict[str, Tensor]:
        """Copy this rank's residual, by name, in the parameters' shapes."""
        return state.residuals(self._session.reducer, self._session.slots)

    def ages(self) -> dict[str, Tensor]:
        """Copy the ages of the residual's entries as floats, like residual(). They are zeros where none waits for others."""
        slots = self._session.slots.slots
        found = {slot.name: torch.zeros(slot.layer.size, device=slot.layer.device) for slot in slots}
        for bucket in self._session.reducer.buckets:
            if (progress := bucket.progress) is not None and progress.selects:
                found |= bucket.layout.views(progress.known_ages().float())
        return {slot.name: slot.shaped(found[slot.name]) for slot in slots}

    def share(self, copy: Callable[[Tensor], Tensor] = Tensor.clone) -> dict[str, Any]:
        """Copy this rank's share of a state."""
        session = self._session
        apart = session.updates.optimizers.averaged is not None
        return state.save_share(session.reducer, session.slots.shapes, sums=session.sums, apart=apart, copy=copy)

    def state_dict(self) -> dict[str, Any]:
        """Copy all that this rank's next step depends on. Refuse this where a step in another thread exchanges meanwhile."""
        session = self._session
        give_up_failed()
        session.phases.note("state_dict()")
        exchanged, done = session.reducer.context.has_begun, session.reducer.steps_done
        place = session.membership.saved_place
        saved = state.pack(session.spec, place.ranks, {place.rank: self.share()})
        if exchanged or session.reducer.context.has_begun or session.reducer.steps_done != done:
            raise RuntimeError(IN_STEP.format(event="state_dict()"))
        return saved

    def load_state_dict(self, saved: Any, make: Callable[[str], Compressor] | None = None) -> None:
        """Continue from a state, or from the list of all ranks' states. The ranks meet at once if they have met before.

        make: makes the compressor of the state's spec, with which the session then continues; by default it keeps its own.
        """
        with self.refusing_together() as facts:
            next(flow := self.loading(saved, facts, make))
        run(flow)

    @contextmanager
    def refusing_together(self) -> Iterator[list[str]]:
        """Check this rank's state inside. Ranks that meet at once all refuse theirs if one does, or has other facts to add."""
        session, refused, facts = self._session, None, list[str]()
        try:
            yield facts
        except Exception as error:
            refused = error
        if session.has_met or session.phases.now is Phase.FAILED:
            with session.noting_failure():
                refused = run(session.membership.agree("; ".join(facts), refused))
        if refused is not None:
            raise refused

    def loading(self, saved: Any, facts: list[str], make: Callable[[str], Compressor] | None = None) -> Flow[None]:
        """Load a state in lock-step with other ranks. The first yield comes after all checks. facts: equal on all ranks."""
        session = self._session
        give_up_failed()
        spec = session.spec if make is None else state.spec_of(saved) or session.spec
        loaded = state.States(saved, spec)
        taken = loaded.take(session.membership.place)
        reducer, compressor = session.reducer, session.compressor
        with reading():
            if make is not None and spec != session.spec:
                compressor = make(spec)
                reducer = session.make_reducer(compressor)
            # A rank that takes no share divides its layers as those of which there are some.
            parts = state.saved_parts(taken.shares or loaded.shares, session.slots.shapes)
            if parts is not None and reducer.on_updates:
                reducer = session.make_reducer(compressor, parts)
            load = state.load_shares(reducer, taken, loaded.steps)
        facts.append(f"step {loaded.steps} of {spec}, sums={loaded.sums}, {[each.layout.names for each in reducer.buckets]}")
        meets_again = session.has_met or session.phases.now is Phase.FAILED
        yield
        if parts is not None:
            session.updates.optimizers.adopt(parts)
        session.restore(load, reducer, compressor)
        session.membership.note_loaded(taken.of, loaded.ranks)
        session.sums = loaded.sums
        if loaded.apart and not reducer.on_updates:
            session.updates.optimizers.turn(to_updates=False, were_apart=True)
        if meets_again:
            with session.noting_failure():
                yield from session.meeting()

    def load_residuals(self, residuals: Mapping[str, Tensor], ages: Mapping[str, Tensor], steps: int) -> None:
        """Continue with these residuals and ages, by name, in the parameters' shapes. A compressor's own state begins anew."""
        session = self._session
        give_up_failed()
        reducer = session.make_reducer(session.compressor)
        for name, view in state.residual_views(reducer).items():
            view.copy_(reducer.slots[name].flat(residuals[name]))
        reducer.steps_done = steps
        for bucket in reducer.buckets:
            bucket.steps = steps
            if ages and bucket.progress is not None and bucket.progress.selects:
                bucket.progress.make_ages()
                for name, view in bucket.layout.views(bucket.progress.ages).items():
                    view.copy_(reducer.slots[name].flat(ages[name]))
        session.restore(lambda: None, reducer, session.compressor)

    # Commits: copies of the state in main memory, as elastic jobs make them.

    def commit(self) -> None:
        """Keep a copy of the state, beside the last one."""
        session = self._session
        give_up_failed()
        session.phases.note("commit()")
        share = state.in_main_memory(self.share(lambda view: view))
        self._commits.append(Snapshot(session.compressor, share, session.membership.owner))

    def roll_back(self) -> None:
        """Return to the last commit, also in the middle of a step or after one that failed. The ranks then meet again."""
        if self._commits:
            self._restore(self._commits[-1])

    def sync(self) -> None:
        """Meet the other ranks, and go on where rank 0 goes on, since all take rank 0's weights."""
        self._session.meet(leader=0)

    def go_back(self, steps: int) -> bool:
        """Return to the newest commit after these steps, of the present spec unless auto chooses. False: there is none."""
        spec = self._session.spec if self._session.turns is None else None
        found = [each for each in self._commits if each.share["steps"] == steps and spec in (None, str(each.compressor))]
        if found:
            self._restore(found[-1])
        return bool(found)

    def _restore(self, snapshot: Snapshot) -> None:
        session, share = self._session, snapshot.share
        reducer = session.reducer
        if snapshot.compressor is not session.compressor:  # a change of spec came after the commit
            reducer = session.make_reducer(snapshot.compressor)
        taken = state.Taken({0: share}, 1.0, state.Place(0, 1))
        load = state.load_shares(reducer, taken, share["steps"], trusted=True)
        session.restore(load, reducer, snapshot.compressor)
        session.membership.restore(snapshot.owner)
        session.sums = share["sums"]
