"""The commits of a session, for Horovod's elastic mode: copies of its state in main memory."""

from __future__ import annotations

from collections import deque

from gradcomp.engine.session import Session, Snapshot


class Commits:
    """The last two commits of a session, for a training that rolls back.

    Ranks may differ by one commit where one of them fails while the others commit. A rank that is ahead goes back by one.
    """

    def __init__(self, session: Session):
        self._session = session
        self._kept: deque[Snapshot] = deque(maxlen=2)

    def commit(self) -> None:
        """Keep a copy of the session's state in main memory."""
        self._kept.append(self._session.snapshot())

    def roll_back(self) -> None:
        """Return to the last commit. The ranks then meet again."""
        if self._kept:
            self._session.restore(self._kept[-1])

    def sync(self) -> None:
        """Meet the other ranks, and go on where rank 0 goes on, since all take rank 0's weights."""
        self._session.meet(leader=0, go_back=self._go_back)

    def _go_back(self, steps: int) -> bool:
        """Return to the commit after this number of steps, if there is one."""
        for kept in self._kept:
            if kept.share["steps"] == steps:
                self._session.restore(kept)
                return True
        return False
