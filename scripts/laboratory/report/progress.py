"""Progress of long work: one line in place on a terminal, else a line every few seconds."""

from __future__ import annotations

import sys
import time

# Cells of a progress bar.
WIDTH = 30


class Progress:
    """A line on stderr that is overwritten on a terminal. Elsewhere a new line at most every few seconds."""

    def __init__(self, every: float = 10.0):
        self._every = every
        self._began = self._said = time.monotonic()

    def __call__(self, text: str, share: float | None = None) -> None:
        """Show the text, with a bar if the share of the work that is done is known."""
        now = time.monotonic()
        line = f"{text}  {now - self._began:.0f} s"
        if sys.stderr.isatty():
            print(f"\r\033[K{bar(share)}{line}", end="", file=sys.stderr, flush=True)
        elif share == 1 or now - self._said >= self._every:
            self._said = now
            print(line, file=sys.stderr, flush=True)

    def end(self) -> None:
        """Clear the line."""
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def bar(share: float | None) -> str:
    """Draw a bar, or nothing where the share is unknown."""
    if share is None:
        return ""
    full = int(WIDTH * share)
    return f"[{'#' * full}{'.' * (WIDTH - full)}] "
