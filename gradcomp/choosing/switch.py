"""The switch from one way to another, which all ranks make in the same turn; and the figures that they share there."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeVar

import torch

from gradcomp.choosing.ways import FIRST, SENDS_ALL, Way
from gradcomp.core.requests import Gather
from gradcomp.engine.sessions.session import Session
from gradcomp.engine.states.kept_arrays import views
from gradcomp.messages import payload as payloads
from gradcomp.prediction.link import Measured
from gradcomp.spec import make

T = TypeVar("T")
# A course yields the number of steps until its next turn, and gets the seconds that each of them took.
Course = Generator[int, list[float], T]

# The steps in which all that waits must have been sent. What waits of a frozen layer cannot be.
PATIENCE = 3


class Switch:
    """The way of a session.

    changes: how often it was changed, tries among them. refused: the ways that do not suit the training, and why.
    """

    def __init__(self, session: Session):
        self._session, self.changes = session, 0
        self.begin_anew(FIRST)

    def begin_anew(self, way: Way) -> None:
        """Begin anew with the way that the session has."""
        self.way = way
        self.refused: dict[Way, str] = {}
        self.open()

    def open(self) -> None:
        """Begin a choice. stuck: entries wait that cannot be sent, so that ways without a residual are out of reach."""
        self.stuck = False

    def to(self, way: Way) -> Course[bool]:
        """Go on by another way, after the steps that this needs. Return False if the session now has another one."""
        left = PATIENCE
        while way != self.way and way not in self.refused:
            busy, waiting = self.means([float(self._busy()), float(self._waits())])
            if busy:
                yield 1
            elif waiting and not way.keeps:
                self.stuck |= left == 0
                if self.stuck:
                    break
                left -= 1
                if self.way == SENDS_ALL or self._change(SENDS_ALL):
                    yield 1
            else:
                self._change(way)
        return way == self.way

    def means(self, own: Sequence[float]) -> list[float]:
        """Return the means of these figures over the ranks. All ranks get the same ones."""
        return [sum(each) / len(each) for each in zip(*self._gather(own), strict=True)]

    def of_first(self, own: Sequence[int]) -> list[int]:
        """Return the first rank's figures, on all ranks."""
        return [int(each) for each in self._gather(own)[0]]

    def _gather(self, own: Sequence[float]) -> list[list[float]]:
        network = self._session.network
        payload = payloads.wrap(torch.tensor(own, dtype=torch.float64).to(network.device))
        replies = network.start(Gather(payload), f"auto's choice, figures {len(own)}")()
        assert isinstance(replies, list)
        return [reply["bytes"].tolist() for reply in replies]

    def mean_of(self, links: Measured) -> Measured:
        """Return the means of measured links over the ranks."""
        means = iter(self.means([figure for line in links.lines.values() for figure in line]))
        return Measured({kind: (next(means), next(means)) for kind in links.lines})

    def _change(self, way: Way) -> bool:
        if way.spec == self.way.spec:  # only who exchanges its gradients is another one
            self._session.exchange_by(way.stock)
            self.way, self.changes = way, self.changes + 1
            return True
        try:
            prepared = self._session.prepare(make(way.spec), drops=not way.keeps)
        except ValueError as error:  # on all ranks alike
            self.refused[way] = str(error)
            return False
        self._session.go_on_with(prepared, way.stock)
        self.way, self.changes = way, self.changes + 1
        return True

    def _busy(self) -> bool:
        """Return True if an update waits for the optimizer's step, after which a change may come."""
        return self._session.training.update_waits

    def _waits(self) -> bool:
        """Return True if entries wait in the residual, also those that were set aside with a frozen layer."""
        return any(bool(view.any()) for view in views(self._session.reducer, "residual").values())
