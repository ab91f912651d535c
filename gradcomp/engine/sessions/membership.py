"""A rank among the others: when they met last, and for which number of ranks its residual is scaled."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from gradcomp.core.compressor import Compressor
from gradcomp.engine.sessions.agreement import Facts
from gradcomp.engine.sessions.meeting import Meeting
from gradcomp.engine.state import Place, States, Taken, pack, scale_state
from gradcomp.engine.steps.reducer import Reducer
from gradcomp.networks import Connection

log = logging.getLogger("gradcomp")


class Owner(NamedTuple):
    """The place at which a residual was made; of 0 ranks before the first meeting.

    scaled_for: the number of ranks over whose mean the residual will be sent. loaded: it was loaded since the last meeting.
    """

    place: Place = Place(0, 0)
    scaled_for: int = 0
    loaded: bool = False


class Snapshot(NamedTuple):
    """A rank's share of a state in main memory, with the compressor and the owner of the residual."""

    compressor: Compressor
    share: dict[str, Any]
    owner: Owner


class Membership:
    """This rank among the others.

    owner: the owner of its residual. sums: updates are sums over the ranks, not means.
    """

    def __init__(self, network: Connection):
        self._network = network
        self._met_in: object = None  # the network's generation in which the ranks met last
        self._ever_met = False
        self.owner = Owner()
        self.sums = False

    @property
    def has_met(self) -> bool:
        """True if the ranks have met since the network was last initialised."""
        return self._met_in is self._network.generation

    @property
    def place(self) -> Place | None:
        """Return this rank's place; None before the network is initialised."""
        return Place(self._network.world.rank, self._network.world.size) if self._network.ready else None

    def part(self) -> None:
        """Make the ranks meet again before their next exchange."""
        self._met_in = None

    def meet(
        self,
        reducer_of: Callable[[], Reducer],
        terms: Mapping[str, str],
        leader: int | None = None,
        go_back: Callable[[int], bool] = lambda steps: False,
        follow: Callable[[Meeting], None] = lambda meeting: None,
    ) -> None:
        """Wait for the other ranks. Check that the terms are equal, adopt the shared state, and scale the residual.

        leader: the rank whose state the others adopt where they differ; by default the first with the most steps.
        go_back: called with the leader's steps on a rank that has done others. It restores a state after as many, if it can.
        follow: called before state is shared. It and go_back may replace the reducer.
        """
        generation, owner, done = self._network.generation, self.owner, reducer_of().steps_done
        self._network.prepare()
        meeting = Meeting(self._network)
        facts = Facts(done, owner.place.ranks, owner.place.rank, int(owner.loaded), int(self._ever_met))
        steps = meeting.compare(terms, facts, leader).steps
        rank, size, _ = self._network.world
        if meeting.joins:
            scale_state(reducer_of(), 0.0)
            self.owner = Owner()
        elif steps != done and not go_back(steps) and done:
            log.warning("gradcomp: the residual of rank %d is of step %d, but all ranks go on after step %d", rank, done, steps)
        owner = self.owner
        follow(meeting)
        reducer = reducer_of()
        meeting.share(reducer)
        if owner.scaled_for not in (0, size) and not self.sums:
            scale_state(reducer, size / owner.scaled_for)
        self.owner = Owner(Place(rank, size), size)
        self._met_in, self._ever_met = generation, True

    def note_step(self, scale: float) -> None:
        """Learn from a finished step whether updates are sums. The scale is 1 for a mean, and for one rank it says nothing."""
        if self._network.world.size > 1:
            self.sums = scale != 1.0

    def note_loaded(self, taken: Taken, loaded: States) -> None:
        """Note the owner of a residual that was loaded."""
        place = self.place
        self.restore(Owner(taken.of, place.ranks if place else loaded.ranks, loaded=True), loaded.sums)

    def restore(self, owner: Owner, sums: bool) -> None:
        """Note the owner of a residual that replaced this rank's. The ranks then meet again."""
        self.owner, self.sums, self._met_in = owner, sums, None

    def pack(self, spec: str, share: Mapping[str, Any]) -> dict[str, Any]:
        """Make a state of this rank's share."""
        place = self.owner.place
        if place.ranks != self.owner.scaled_for or not place.ranks:
            here = self.place or Place(0, 1)  # a rank outside its process set trains by itself
            place = Place(here.rank, self.owner.scaled_for or here.ranks)
        return pack(spec, place.ranks, {place.rank: share})
