"""Waits for other ranks: a rank that waits long says for whom, in which exchange and since when."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from typing import Protocol

from gradcomp.requests import World

# Seconds after which a waiting rank leaves a note for the others, seconds after which it speaks first, and the factor from
# each such time to the next. Notes come earlier, so that the ranks that wait know of each other when they speak.
NOTE_AFTER, SPEAK_AFTER, FACTOR = 5.0, 10.0, 3.0

log = logging.getLogger("gradcomp")


class Notes(Protocol):
    """The notes of the ranks of a network, which they can read without an exchange."""

    def write(self, text: str) -> None:
        """Leave this rank's note; an empty one takes it back."""

    def read(self) -> Mapping[int, str] | None:
        """Read the notes of all ranks that left one. None where ranks cannot leave any."""


class Wait:
    """One wait of this rank for the others, in the exchange of a request: a context, in which look() is called.

    name: the name of the request, the same on all ranks.
    """

    def __init__(self, notes: Notes, world: World, name: str):
        self._notes, self._world = notes, world
        self._place = place_of(name)
        self._began = time.monotonic()
        self._note_left = False
        self._speak_after = SPEAK_AFTER

    @property
    def next_look(self) -> float:
        """Return the seconds until look() has something to do."""
        after = self._speak_after if self._note_left else NOTE_AFTER
        return max(0.01, self._began + after - time.monotonic())

    def look(self, absent: Collection[int] | None = None) -> None:
        """Leave a note or speak if it is time. Call this again and again while waiting.

        absent: the ranks that are waited for, where that is known.
        """
        waited = time.monotonic() - self._began
        if not self._note_left and waited >= NOTE_AFTER:
            self._note_left = True
            self._notes.write(self._place)
        if waited >= self._speak_after:
            self._speak_after = waited * FACTOR
            log.warning("%s", self._report(waited, absent))

    def __enter__(self) -> Wait:
        return self

    def __exit__(self, *failure: object) -> None:
        """Take the note back, also where the wait fails."""
        if self._note_left:
            self._notes.write("")

    def _report(self, waited: float, absent: Collection[int] | None) -> str:
        others, notes = self._world.others, self._notes.read()
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - waited))
        if absent is None and notes is not None:
            absent = [rank for rank in others if notes.get(rank) != self._place]
        whom = "the other ranks" if absent is None else _ranks(absent) if absent else "the network: all ranks wait here"
        said = [f"gradcomp: rank {self._world.rank} has waited {waited:.0f} s, since {since}, in {self._place} for {whom}"]
        elsewhere = {rank: place for rank, place in (notes or {}).items() if rank in (absent or ()) and place}
        said += [f"rank {rank} waits in {place}" for rank, place in elsewhere.items()]
        if silent := [rank for rank in absent or () if rank not in elsewhere]:
            said.append(f"{_ranks(silent)} may be computing, may have ended, or may not have called gradcomp as this rank did")
        return "; ".join(said)


def place_of(name: str) -> str:
    """Describe the exchange of a request by the request's name."""
    bucket, dot, number = name.partition(".")
    return f"bucket {bucket}, request {number}" if dot else "the meeting that all ranks call (first step, attach() or change())"


def _ranks(ranks: Collection[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"
