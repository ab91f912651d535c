"""The switch from one way to another, which all ranks make in the same turn; and the figures that they share there."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch

from gradcomp.choosing.ways import FIRST, Way
from gradcomp.engine.sessions.session import Session
from gradcomp.messages import payload as payloads
from gradcomp.prediction.link import Measured
from gradcomp.requests import Gather
from gradcomp.spec import make

# Sends all that waits in a residual, in one step.
SENDS_ALL = "dense:feedback=true"


class Switch:
    """The way of a session. changes: how often it was changed."""

    def __init__(self, session: Session):
        self._session, self.way, self.changes = session, FIRST, 0
        self._refused: set[Way] = set()

    def to(self, way: Way) -> Generator[int, list[float], bool]:
        """Go on by another way, after the steps that this needs. Return False if the way does not suit the training."""
        while way != self.way and way not in self._refused:
            reducer = self._session.reducer
            waits = reducer.keeps_residual and any(bool(bucket.state.residual.any()) for bucket in reducer.buckets)
            busy, waiting = self.means([float(self._busy()), float(waits)])
            if busy:
                yield 1
            elif waiting and not way.keeps:
                self._session.go_on_with(make(SENDS_ALL))
                yield 1
            else:
                self._change(way)
        return way == self.way

    def note_loaded(self, way: Way) -> None:
        """Note that a state was loaded, whose way this is."""
        self.way = way

    def means(self, own: Sequence[float]) -> list[float]:
        """Return the means of these figures over the ranks. All ranks get the same ones."""
        return [sum(each) / len(each) for each in zip(*self._gather(own), strict=True)]

    def of_first(self, own: Sequence[int]) -> list[int]:
        """Return the first rank's figures, on all ranks."""
        return [int(each) for each in self._gather(own)[0]]

    def _gather(self, own: Sequence[float]) -> list[list[float]]:
        network = self._session.network
        payload = payloads.wrap(torch.tensor(own, dtype=torch.float64).to(network.device))
        replies = network.start(Gather(payload), f"auto figures {len(own)}")()
        assert isinstance(replies, list)
        return [reply["bytes"].tolist() for reply in replies]

    def mean_of(self, links: Measured) -> Measured:
        """Return the means of measured links over the ranks."""
        means = iter(self.means([figure for line in links.lines.values() for figure in line]))
        return Measured({kind: (next(means), next(means)) for kind in links.lines})

    def _change(self, way: Way) -> None:
        try:
            self._session.go_on_with(make(way.spec), way.stock, drops=not way.keeps)
        except ValueError:  # as on all ranks: the spec does not suit the optimizer
            self._refused.add(way)
        else:
            self.way, self.changes = way, self.changes + 1

    def _busy(self) -> bool:
        """Return True if an update waits for the optimizer's step, after which a change may come."""
        try:
            self._session.training.refuse_before_step("a change of auto's way")
        except RuntimeError:
            return True
        return False
