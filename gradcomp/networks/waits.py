"""Waits for other ranks: a rank that waits long says for whom, in which exchange and since when.

A wait that cannot end raises an error: another rank's step failed, or one rank is in a meeting and another one in a step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from typing import NamedTuple, Protocol

from gradcomp.core.requests import World

# Seconds after which a waiting rank leaves a note for the others, seconds after which it speaks first, and the factor from
# each such time to the next. Notes come earlier, so that the ranks that wait know of each other when they speak.
NOTE_AFTER, SPEAK_AFTER, FACTOR = 5.0, 10.0, 3.0

# The place of a rank that is in a meeting.
MEETING = "the meeting that all ranks call (first step, attach(), watch(), change() or load_state_dict())"
# Separates a note's place from the meeting after which it was written; the beginning of a failed rank's note; a note's letters.
_AFTER, _FAILED, MOST_LETTERS = " @ ", "failed in a step:", 600

log = logging.getLogger("gradcomp")


class Notes(Protocol):
    """The notes of the ranks of a network, which they can read without an exchange."""

    def write(self, text: str) -> None:
        """Leave this rank's note; an empty one takes it back."""

    def read(self) -> Mapping[int, str] | None:
        """Read the notes of all ranks that left one. None where ranks cannot leave any."""


class EndlessWait(RuntimeError):
    """The error of a rank that waits for another one in vain."""


class Note(NamedTuple):
    """A rank's note, read: its place, and the meeting after which it was written."""

    place: str
    meeting: str

    @property
    def text(self) -> str:
        return f"{self.place}{_AFTER}{self.meeting}" if self.meeting and self.place else self.place

    @property
    def failed(self) -> bool:
        return self.place.startswith(_FAILED)


class Wait:
    """One wait of this rank for the others, in the exchange of a request: a context, in which look() is called.

    name: the name of the request, the same on all ranks. meeting: the name of the latest meeting, the same on all ranks.
    leaves_note: False keeps a note that says more.
    """

    def __init__(self, notes: Notes, world: World, name: str, meeting: str = "", leaves_note: bool = True):
        self._notes, self._world, self._meeting = notes, world, meeting
        self._place = place_of(name)
        self._began = time.monotonic()
        self._leaves_note, self._note_left = leaves_note, False
        self._speak_after = SPEAK_AFTER

    @property
    def next_look(self) -> float:
        """Return the seconds until look() has something to do."""
        after = self._speak_after if self._note_left or not self._leaves_note else NOTE_AFTER
        return max(0.01, self._began + after - time.monotonic())

    def look(self, absent: Collection[int] | None = None) -> None:
        """Leave a note or speak if it is time. Call this again and again while waiting.

        absent: the ranks that are waited for, where that is known.
        """
        waited = time.monotonic() - self._began
        if self._leaves_note and not self._note_left and waited >= NOTE_AFTER:
            self._note_left = True
            self._notes.write(Note(self._place, self._meeting).text)
        if waited >= self._speak_after:
            is_first, self._speak_after = self._speak_after == SPEAK_AFTER, waited * FACTOR
            read = self._notes.read()
            notes = None if read is None else {rank: read_note(text) for rank, text in read.items()}
            log.warning("%s", self._report(waited, absent, notes))
            self._refuse_endless(notes or {}, is_first)

    def __enter__(self) -> Wait:
        return self

    def __exit__(self, *failure: object) -> None:
        """Take the note back, also where the wait fails."""
        if self._note_left:
            self._notes.write("")

    def _refuse_endless(self, notes: Mapping[int, Note], is_first: bool) -> None:
        """Raise an error if this wait cannot end.

        is_first: notes of ranks that only wait may be outdated, and a rank that failed may come to a meeting. Both count once
        this rank speaks again.
        """
        for rank, note in notes.items():
            if rank == self._world.rank or not note.meeting or note.meeting != self._meeting:
                continue
            if note.failed and not (is_first and self._place == MEETING):
                raise EndlessWait(f"rank {rank} cannot go on ({note.place}); start all ranks again from their last states")
            if not is_first and (note.place == MEETING) != (self._place == MEETING):
                raise EndlessWait(
                    f"rank {self._world.rank} waits in {self._place}, but rank {rank} in {note.place}: watch(), "
                    "change() and load_state_dict() are for all ranks at the same step (where one rank alone is to write, the "
                    "others call watch() without a writer); start all ranks again from their last states"
                )

    def _report(self, waited: float, absent: Collection[int] | None, notes: Mapping[int, Note] | None) -> str:
        others = self._world.others
        places = {rank: note.place for rank, note in (notes or {}).items()}
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - waited))
        if absent is None and notes is not None:
            absent = [rank for rank in others if places.get(rank) != self._place]
        whom = "the other ranks" if absent is None else in_words(absent) if absent else "the network: all ranks wait here"
        said = [f"gradcomp: rank {self._world.rank} has waited {waited:.0f} s, since {since}, in {self._place} for {whom}"]
        elsewhere = {rank: place for rank, place in places.items() if rank in (absent or ()) and place}
        said += [f"rank {rank} {'' if place.startswith(_FAILED) else 'waits in '}{place}" for rank, place in elsewhere.items()]
        if silent := [rank for rank in absent or () if rank not in elsewhere]:
            said.append(
                f"{in_words(silent)} may be computing, may have ended, or may not have called gradcomp as this rank did"
            )
        return "; ".join(said)


def failure_sentence(error: BaseException, where: str = "", cause: str = "") -> str:
    """Say that an exchange has failed, and what may have caused it. cause: one that comes first."""
    text = str(error).rstrip()
    end = "" if text.endswith((".", "!", "?")) else "."
    causes = [*([cause] if cause else []), "a rank ended or raised an error (see its output)", "the network failed"]
    return f"gradcomp's exchange failed{where and f' in {where}'}: {text}{end} Possible causes: {'; '.join(causes)}."


def failure_note(error: BaseException, meeting: str) -> str:
    """Write the note of a rank whose step failed."""
    return Note(f"{_FAILED} {type(error).__name__}: {error}".replace(_AFTER, " ")[:MOST_LETTERS], meeting).text


def read_note(text: str) -> Note:
    """Read a note."""
    place, _, meeting = text.partition(_AFTER)
    return Note(place, meeting)


def place_of(name: str) -> str:
    """Describe the exchange of a request by the request's name."""
    bucket, dot, number = name.partition(".")
    if bucket == "watch":
        return f"telemetry's {number}"
    if bucket == "auto":
        return f"auto's choice ({number})"
    return f"bucket {bucket}, request {number}" if dot else MEETING


def in_words(ranks: Collection[int]) -> str:
    """Name ranks in a message."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"
