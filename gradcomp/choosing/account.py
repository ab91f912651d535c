"""The account of a choice: the time that it has taken beyond that of its steps."""

from __future__ import annotations

import math

# A step that takes this many usual ones without its turn contains a pause that is not the choice's: a validation, for example.
PAUSE = 3.0


class Account:
    """The steps of one rank since open(), and their seconds, in which measuring and changes of way are contained.

    usual: about the seconds of a step of stock; infinite while nobody knows.
    """

    def __init__(self) -> None:
        self.open()

    def open(self) -> None:
        """Begin anew."""
        self.usual, self._steps, self._seconds, self._turn = math.inf, 0, 0.0, 0.0

    def note_turn(self, seconds: float) -> None:
        """Note the turn before a step."""
        self._turn += seconds

    def note_step(self, seconds: float) -> None:
        """Note a step, and the turn within it."""
        rest = seconds - self._turn
        self._seconds += self._turn + (rest if rest < PAUSE * self.usual else self.usual)
        self._steps, self._turn = self._steps + 1, 0.0

    def cost(self, step: float, unit: float) -> float:
        """Return what was spent beyond steps that take so long, in units of seconds."""
        return (self._seconds - self._steps * step) / unit
