"""Turns: what all ranks of a session do together between two steps."""

from __future__ import annotations

from typing import Protocol


class Turns(Protocol):
    """The turns of one rank. All ranks take them before the same steps."""

    @property
    def due(self) -> bool:
        """True if a turn comes before the next exchange. It is equal on all ranks."""

    def take(self) -> None:
        """Take the turn. No gradient of the step was handed over yet."""

    def note_step(self) -> None:
        """Note a finished step."""

    def begin_anew(self, spec: str, same: bool) -> None:
        """Begin anew in a meeting: the ranks may be others, or go on from another state.

        spec: with which all ranks go on. same: the session has its compressor already.
        """
