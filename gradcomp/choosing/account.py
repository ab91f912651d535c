"""The account of a choice: the time that it has taken beyond that of its steps."""

from __future__ import annotations

import math
import statistics
import time

# A step that takes this many usual ones without its turn contains a pause that is not the choice's: a validation, for example.
PAUSE = 3.0
# The steps between two turns whose median tells what is usual there.
TELLING = 3


class Account:
    """The steps of one rank since open(), and their seconds, in which measuring and changes of way are contained.

    usual: about the seconds of a step of stock; infinite while nobody knows.
    """

    def __init__(self) -> None:
        self._began: float | None = None
        self.open()

    def open(self) -> None:
        """Begin anew, perhaps within a turn: the rest of it counts."""
        self.usual, self._steps, self._seconds, self._turn = math.inf, 0, 0.0, 0.0
        self._began = None if self._began is None else time.perf_counter()
        self._since_turn: list[float] = []

    def note_step(self, seconds: float) -> None:
        """Note a step, and the turn within it."""
        self._seconds += self._turn
        self._since_turn.append(seconds - self._turn)
        self._turn = 0.0

    def begin_turn(self) -> None:
        """Note that a turn begins: the steps since the last one went by one way, and what is usual there leaves pauses out."""
        rests, self._since_turn = self._since_turn, []
        usual = statistics.median(rests) if len(rests) >= TELLING else self.usual
        self._seconds += sum(rest if rest < PAUSE * usual else usual for rest in rests)
        self._steps += len(rests)
        self._began = time.perf_counter()

    def end_turn(self) -> None:
        """Note that the turn ends. The next step contains it."""
        self._turn += self._of_turn
        self._began = None

    @property
    def mark(self) -> tuple[float, int]:
        """The seconds until now, in a turn, and the steps until it began."""
        return self._seconds + self._of_turn, self._steps

    @property
    def _of_turn(self) -> float:
        return 0.0 if self._began is None else time.perf_counter() - self._began

    def cost(self, step: float, since: tuple[float, int] = (0.0, 0)) -> float:
        """Return the seconds that were spent from a mark until now beyond steps that take so long."""
        seconds, steps = self.mark
        return seconds - since[0] - (steps - since[1]) * step
