"""Waits for other ranks: a rank that waits long logs the exchange that it waits in, and the missing ranks if they are known.

A wait ends by the timeout of torch's process group, or by Horovod's limit.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection

# Seconds after which a waiting rank tells the others where it is, seconds until its first line, and the factor to the next.
TELL_AFTER, SPEAK_AFTER, FACTOR = 5.0, 10.0, 3.0

# The place of a rank that is in a meeting.
MEETING = "the meeting that all ranks call (in attach(), the first step, watch(), change(), remove() and load_state_dict())"

log = logging.getLogger("gradcomp")


class Wait:
    """One wait of a rank for the others.

    place: the exchange, the same on all ranks. timeout: its longest time, in seconds. waited: seconds that it has lasted.
    """

    def __init__(self, rank: int, place: str, timeout: float = math.inf, waited: float = 0.0):
        self._rank, self._place = rank, place
        self._end = "" if timeout == math.inf else f". The timeout ends this wait after {timeout:.0f} s"
        self._began = time.monotonic() - waited
        self._speak_after = SPEAK_AFTER

    @property
    def seconds_left(self) -> float:
        """Return the seconds until the next line, at least a moment."""
        return max(0.01, self._began + self._speak_after - time.monotonic())

    def look(self, missing: Collection[int] | None = None) -> None:
        """Log a line if it is time. Call this again and again while waiting.

        missing: the ranks that have not come; None if they are unknown.
        """
        waited = time.monotonic() - self._began
        if waited < self._speak_after:
            return
        self._speak_after = waited * FACTOR
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - waited))
        if missing is None:
            whom = "the other ranks"
        elif missing:
            causes = ["be computing", "have ended", "not have called gradcomp as this rank did"]
            first, second, third = reversed(causes) if self._place == MEETING else causes  # the likeliest comes first
            whom = f"{in_words(missing)}, which may {first}, may {second}, or may {third}"
        else:
            whom = "the network: all ranks wait here"
        whom += self._end
        log.warning("gradcomp: rank %d has waited %.0f s, since %s, in %s for %s", self._rank, waited, since, self._place, whom)


def failure_sentence(error: BaseException, where: str = "", cause: str = "") -> str:
    """Say that an exchange has failed, and list possible causes. cause: one that comes first."""
    text = str(error).rstrip()
    end = "" if text.endswith((".", "!", "?")) else "."
    causes = [*([cause] if cause else []), "a rank ended or raised an error (see its output)", "the network failed"]
    return f"gradcomp's exchange failed{where and f' in {where}'}: {text}{end} Possible causes: {'; '.join(causes)}."


def in_words(ranks: Collection[int]) -> str:
    """Name ranks in a message."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"
